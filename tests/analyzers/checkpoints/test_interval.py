"""The interval between saves: Young's and Daly's formulas against a simulation, and from a recorded run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analyzers.checkpoints.interval import daly_interval_s, suggest, young_interval_s
from analyzers.checkpoints.policy import FailurePolicy
from tests.analyzers.memory_store import MemoryStore


def _efficiency(interval_s: float, cost_s: float, mtbf_s: float, failures: int = 40_000) -> float:
    """Share of the time that is kept work, simulated: exponential failures, a restart that costs nothing."""
    times = np.random.default_rng(1).exponential(mtbf_s, failures)
    segments = np.floor(times / (interval_s + cost_s))
    return float((segments * interval_s).sum() / times.sum())


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1.0, 3600.0), (60.0, 3600.0), (600.0, 3600.0)])
def test_no_other_interval_keeps_more_work(cost_s: float, mtbf_s: float) -> None:
    best = _efficiency(daly_interval_s(cost_s=cost_s, mtbf_s=mtbf_s), cost_s, mtbf_s)
    for factor in (0.5, 0.7, 1.4, 2.0):
        assert best >= _efficiency(factor * daly_interval_s(cost_s=cost_s, mtbf_s=mtbf_s), cost_s, mtbf_s) - 0.002


def test_the_higher_order_matters_where_saves_are_long() -> None:
    assert daly_interval_s(cost_s=0.01, mtbf_s=1e6) == pytest.approx(
        young_interval_s(cost_s=0.01, mtbf_s=1e6), rel=1e-3
    )
    # By hand: sqrt(2 * 60 * 3600) = 657.27; 1 + sqrt(1/120) / 3 + (1/120) / 9 = 1.031355; less 60.
    assert daly_interval_s(cost_s=60.0, mtbf_s=3600.0) == pytest.approx(617.88, abs=0.01)
    assert daly_interval_s(cost_s=100.0, mtbf_s=50.0) == 50.0
    assert math.isclose(daly_interval_s(cost_s=99.9, mtbf_s=50.0), 44.4, rel_tol=0.01)


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0)])
def test_invalid_values_are_refused(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        daly_interval_s(cost_s=cost_s, mtbf_s=mtbf_s)


def _recorded(attempts: int, stall_s: float, duration_s: float) -> MemoryStore:
    """100 steps of half a second an attempt, and four saves."""
    store = MemoryStore()
    for attempt in range(attempts):
        starts = [int(5e8) * step for step in range(100)]
        store.add(
            "steps",
            [
                {"attempt": attempt, "rank": 0, "step": step, "start_ns": start, "duration_ns": int(5e8)}
                for step, start in enumerate(starts)
            ],
        )
    store.add(
        "checkpoints",
        [
            {"attempt": 0, "rank": 0, "step": step, "tier": "disk", "state": "verified",
             "stall_ns": int(stall_s * 1e9), "duration_ns": int(duration_s * 1e9)}
            for step in (20, 40, 60, 80)
        ],
    )  # fmt: skip
    return store


def test_a_run_that_failed_gives_its_own_rate() -> None:
    found = suggest(_recorded(5, 0.02, 1.0), {"world_size": 4})
    assert found is not None
    assert (found.num_saves, found.num_failures, found.cost_s) == (4, 4, 0.02)
    assert found.mtbf_s == pytest.approx(5 * 50 / 4)
    assert found.interval_s == pytest.approx(daly_interval_s(cost_s=0.02, mtbf_s=62.5))
    assert found.steps == round(found.interval_s / 0.5)


def test_without_failures_the_rate_is_assumed() -> None:
    found = suggest(_recorded(1, 0.02, 1.0), {"world_size": 4}, FailurePolicy(device_mtbf_s=4000.0))
    assert found is not None
    assert (found.num_failures, found.mtbf_s) == (0, 1000.0)


def test_the_interval_is_no_shorter_than_a_save() -> None:
    found = suggest(_recorded(5, 0.001, 30.0), {})
    assert found is not None
    assert found.interval_s == 30.0


def test_without_saves_nothing_is_suggested() -> None:
    assert suggest(MemoryStore(), {}) is None
