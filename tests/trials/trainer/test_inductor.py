"""Blocks that inductor compiled compute what eager ones do, in every layout, and with fewer kernels. On a CPU.

Minutes of the C++ compiler, so `make test` traces with `aot_eager` (tests/trainer/parallel/test_variants.py).
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cost.kernels import kernels_a_step
from tests.processes import run_ranks
from tests.trainer.layouts import compare, tiny, train_layouts
from trainer.layout.resolve import resolve
from trainer.training.build import build

pytestmark = [pytest.mark.trial(times=1), pytest.mark.timeout(3000)]

STEPS = 3
INDUCTOR = {"compile": True, "compile_backend": "inductor"}
EXPERTS = {"model": {"num_experts": 4, "expert_dim": 64}}

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"parallel": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp": {"parallel": {"dp_shard": 2}},
    "fsdp, recomputation, two microbatches": {
        "parallel": {"dp_shard": 2},
        "train": {"activation_checkpointing": "full", "micro_batch_size": 2},
    },
    "fsdp, selective recomputation": {
        "parallel": {"dp_shard": 2},
        "train": {"activation_checkpointing": "selective"},
    },
    "fsdp, loss in chunks": {"parallel": {"dp_shard": 2}, "train": {"chunked_loss": True}},
    "tp": {"parallel": {"dp_shard": 1, "tp": 2}},
    "tp, no sequence parallel": {"parallel": {"dp_shard": 1, "tp": 2, "sequence_parallel": False}},
    "pp": {"parallel": {"dp_shard": 1, "pp": 2}, "train": {"micro_batch_size": 2}},
    "cp": {"parallel": {"dp_shard": 1, "cp": 2}},
    "cp, ring": {"parallel": {"dp_shard": 1, "cp": 2, "cp_exchange": "ring"}},
    "ep": {"parallel": {"dp_shard": 1, "ep": 2}, **EXPERTS},
    "tp, experts": {"parallel": {"dp_shard": 1, "tp": 2}, **EXPERTS},
}


@pytest.fixture(autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and layouts share what was compiled; nothing of former trials is in it."""
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks_compute_what_eager_ones_do(name: str) -> None:
    sections = LAYOUTS[name]
    compiled = {**sections, "train": {**sections.get("train", {}), **INDUCTOR}}
    by_rank = run_ranks(
        train_layouts, world_size=2, args=({"eager": sections, "compiled": compiled}, STEPS), deadline_s=1500
    )
    for rank in by_rank:  # one by one: a rank of a pipeline has its stage's parameters
        compare(rank["eager"], [rank["compiled"]], loss=1e-4, parameter=5e-4)


def kernels(rank: int, world_size: int, compiled: bool) -> Counter[str]:
    """Kernels of the third step by name; for `run_ranks`."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True
    config = tiny(train={**(INDUCTOR if compiled else {}), "steps": STEPS})
    training = build(config, resolve(config, 1), torch.device("cpu"))

    def step(number: int) -> None:
        training.forward_backward(training.batch(number))
        training.clip()
        training.step(number)

    numbers = count()
    for _ in range(STEPS - 1):
        step(next(numbers))
    return kernels_a_step(lambda: step(next(numbers)), 1)


def test_a_compiled_step_has_fewer_kernels(tmp_path: Path) -> None:
    (eager,) = run_ranks(kernels, world_size=1, args=(False,), deadline_s=600)
    (compiled,) = run_ranks(kernels, world_size=1, args=(True,), deadline_s=1500)
    fused = {name: count for name, count in compiled.items() if "cpp_fused" in name}
    print(f"kernels a step: {eager.total()} eager, {compiled.total()} compiled, of which {sum(fused.values())} fused")
    assert fused
    assert not any("cpp_fused" in name for name in eager)
    assert compiled.total() < 0.7 * eager.total()
