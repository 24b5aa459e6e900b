"""Blocks that are compiled: what the compiler does is recorded, beside what the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from store import Store
from tests.trainer.layouts import tiny
from trainer.config.config import ModelConfig
from trainer.layout.resolve import resolve
from trainer.model.checkpointing import apply_activation_checkpointing
from trainer.model.compiling import compile_blocks, is_compiled
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


@pytest.mark.parametrize(
    ("settings", "device", "has_tools", "expected"),
    [
        ({}, "cuda", True, True),
        ({}, "cuda", False, False),
        ({}, "cpu", True, False),
        ({"compile": True}, "cpu", False, True),
        ({"compile": False}, "cuda", True, False),
        ({"compile_backend": "aot_eager"}, "cuda", False, True),
    ],
)
def test_blocks_are_compiled_by_default_where_a_gpu_has_what_that_needs(
    settings: dict[str, Any], device: str, has_tools: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.model.compiling._has_triton", lambda: has_tools)
    config = tiny(train=settings)
    assert is_compiled(config.train, resolve(config, 1), torch.device(device)) is expected


def test_a_schedule_that_takes_backward_in_two_parts_is_not_compiled_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.model.compiling._has_triton", lambda: True)
    config = tiny(
        parallel={"pp": 2, "dp_shard": 1, "schedule": "interleaved_zero_bubble"},
        model={"num_layers": 4},
        train={"micro_batch_size": 2},
    )
    assert not is_compiled(config.train, resolve(config, 2), torch.device("cuda"))


def test_selective_checkpointing_is_compiled_with_the_block() -> None:
    """The block keeps its input, matrix products and attention, no more, and the gradients are those without it."""
    none, everything = _gradients_and_kept_bytes("none")
    selective, kept = _gradients_and_kept_bytes("selective")
    for name, gradient in none.items():
        torch.testing.assert_close(selective[name], gradient, rtol=1e-4, atol=1e-5)
    # In widths of 32: input, query, key, value, attention, out, gate, up; and a logarithm for each row and head.
    assert kept == 4 * 2 * 16 * ((1 + 5 + 2 * 2) * 32 + 2) < everything


def _gradients_and_kept_bytes(checkpointing: str) -> tuple[dict[str, torch.Tensor], int]:
    torch._dynamo.reset()
    config = tiny(
        model={"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 64},
        train={"activation_checkpointing": checkpointing},
    )
    model = Transformer(config.model)
    initialise(model, config.model, seed=0)
    apply_activation_checkpointing(model, config.train)
    compile_blocks(model, "aot_eager")
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), model.cos, model.sin)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.blocks["0"](x, model.cos, model.sin)
    out.square().sum().backward()
    torch._dynamo.reset()
    gradients = {name: p.grad for name, p in model.blocks.named_parameters() if p.grad is not None}
    return gradients, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
