"""Blocks that are compiled: what the compiler does is recorded, beside what the model does."""

from __future__ import annotations

from pathlib import Path

import torch

from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from store import Store
from trainer.config.config import ModelConfig
from trainer.model.compiling import compile_blocks
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer
from trainer.rank.instrument import record_compilation


def test_the_first_step_of_a_compiled_model_has_a_span_of_the_compiler(tmp_path: Path) -> None:
    torch._dynamo.reset()
    config = ModelConfig(vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=32)
    model = Transformer(config)
    initialise(model, config, seed=0)
    compile_blocks(model, "eager")
    run = RunDir.create(tmp_path, name="compiled", manifest={})
    recorder = TapeRecorder(run.rank_dir(0, 0), rank=0, attempt=0)
    record_compilation(recorder)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for step in (1, 2):
        with recorder.step(step), recorder.span("forward"):
            model(tokens).sum().backward()
    recorder.close()
    with Store.open(run) as store:
        found = store.rows("SELECT step, bool_and(end_ns IS NOT NULL) FROM spans WHERE kind = 'compile' GROUP BY step")
    assert found == [(1, True)]
    torch._dynamo.reset()
