"""Traces of a CPU with a few short steps: a burst of another job may slow a rank in all of them, which is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.stragglers.files.traces import slow_ranks_of_traces
from store.readers.traces.kineto import RankTrace
from store.readers.traces.rank_traces import PARTS, Steps

NONE = np.zeros((0, 2))


def traced(rank: int, work_ms: float, *, steps: int, longest_ms: float) -> Steps:
    """One rank that works, and waits for the slowest."""
    numbers = np.arange(1, steps + 1)
    begin = np.arange(steps) * longest_ms * 1e3
    found = RankTrace(
        rank=rank, path=Path(f"rank{rank}.json"), world_size=4, stage=0, device="cpu", marked=True, steps=numbers,
        begin_us=begin, end_us=begin + longest_ms * 1e3, compute=NONE, communication=NONE, copies=NONE, data=NONE,
        num_events=100, damaged_events=0,
    )  # fmt: skip
    jitter = np.random.default_rng(rank).normal(0, 0.02, steps)
    parts = {part: np.zeros(steps) for part in PARTS}
    parts["compute"] = work_ms + jitter
    parts["step"] = np.full(steps, longest_ms + 0.5)
    parts["exposed"] = parts["communication"] = parts["step"] - parts["compute"]
    return found, parts


def judged(*, steps: int, step_ms: float, slower: float) -> list[Finding]:
    works = [step_ms * (slower if rank == 2 else 1.0) for rank in range(4)]
    found = slow_ranks_of_traces(
        [traced(rank, work, steps=steps, longest_ms=max(works)) for rank, work in enumerate(works)]
    )
    return [finding for finding in found if finding.kind == "straggler"]


@pytest.mark.parametrize(("steps", "step_ms"), [(15, 8.0), (12, 3.0), (30, 8.0)])
def test_a_rank_that_is_slower_in_few_short_steps_is_not_judged_with_the_reason(steps: int, step_ms: float) -> None:
    (finding,) = judged(steps=steps, step_ms=step_ms, slower=1.5)
    assert finding.status == "insufficient_data"
    assert finding.summary.startswith("Ranks were not compared: rank 2 took 1.50x as long as the others, but the ")
    assert "another job on the host may slow a rank for that long" in finding.summary
    assert "Record 0.5 s or more: schedule(active=" in finding.summary


def test_equal_ranks_of_short_steps_need_no_remark() -> None:
    assert judged(steps=15, step_ms=8.0, slower=1.0) == []


def test_a_rank_that_is_slower_for_long_enough_is_named() -> None:
    (finding,) = judged(steps=80, step_ms=8.0, slower=1.5)
    assert (finding.status, finding.ranks) == ("fired", (2,))
