"""The most that real ranks need is what is planned, to 5 %: gloo's threads hold some buffers for a moment longer.

That it is no less, what parameters and optimizer take, and one process: tests/trainer/plan.
"""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.accuracy.plan_ranks import REPEATS
from tests.processes import run_ranks
from tests.trainer.plan.test_plan import settings
from tests.trainer.plan.test_rank_memory import EP_FSDP, MEASURED, measured, of_experts
from trainer.layout.resolve import resolve
from trainer.plan.footprint.memory import rank_memory


def test_rank_memory_matches_the_plan() -> None:
    ranks = run_ranks(measured, world_size=2, args=(REPEATS,), deadline_s=240)
    for name, sections in MEASURED.items():
        config = settings(sections)
        need = rank_memory(config, resolve(config, 2), pp_rank=0, device="cpu")
        assert need.peak == pytest.approx(min(rank[name].peak for rank in ranks), rel=0.05), name


def test_memory_of_sharded_experts_matches_the_plan() -> None:
    config = settings(EP_FSDP)
    need = rank_memory(config, resolve(config, 4), pp_rank=0, device="cpu")
    ranks = run_ranks(of_experts, world_size=4, args=(REPEATS,), deadline_s=240)
    assert need.peak == pytest.approx(mean(real.peak for real in ranks), rel=0.05)
