"""The bubble benchmark on a small pipeline: real schedules and transfers, recorded and measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from analyzers.account.bubble import expected_idle, measure_idle
from benchmarks.accuracy.bubble import SCHEDULES, STAGES_PER_RANK, recorded_spans, run_timed
from benchmarks.cost.throughput import ratio_with_interval
from tests.probes.recorded_world import recorded_world
from tests.processes import run_ranks

RANKS, MICROBATCHES, STEPS, FORWARD_MS = 2, 4, 2, 8.0


def _run(rank: int, world_size: int, folder: str) -> None:
    options = argparse.Namespace(forward_ms=FORWARD_MS, steps=STEPS)
    with recorded_world(rank, world_size, folder) as recorder:
        for number, name in enumerate(SCHEDULES):
            run_timed(name, recorder, MICROBATCHES, options, number * 1000)


@pytest.mark.timeout(120)
def test_timed_stages_take_their_time_and_leave_the_schedule_its_gaps(tmp_path: Path) -> None:
    run_ranks(_run, world_size=RANKS, args=(str(tmp_path),))
    measured = measure_idle(recorded_spans(tmp_path, RANKS), range(RANKS))
    assert [step.step for step in measured] == [1000 * n + k for n in range(len(SCHEDULES)) for k in range(STEPS + 1)]
    for number, name in enumerate(SCHEDULES):
        expected = expected_idle(name, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=STAGES_PER_RANK[name])
        for step in measured[number * (STEPS + 1) : (number + 1) * (STEPS + 1)]:
            # Transfers add to the schedule's gaps; how much depends on the machine.
            assert step.idle_ratio > expected - 0.02
            for one in step.ranks.values():
                assert one.busy_ns >= MICROBATCHES * 3 * FORWARD_MS * 1e6
                assert len(one.busy_ns_by_stage) == STAGES_PER_RANK[name]


def test_the_interval_of_a_ratio_holds_the_ratio() -> None:
    ratio, low, high = ratio_with_interval([1.0, 1.1, 0.9, 1.05], [0.9, 1.0, 0.85, 0.95])
    assert low <= ratio <= high
    assert ratio == pytest.approx(0.925 / 1.025)
    assert ratio_with_interval([2.0] * 3, [1.0] * 3) == (0.5, 0.5, 0.5)
