"""How a soak is judged."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.durability.soak import faults_and_findings, in_execution_order, match, step_starts
from probes.tape.events import EventWriter
from probes.tape.format.reader import read_segment, segment_paths
from store import Store
from tests.factories import RankWriter, empty_run, make_run

S = 10**9


def test_the_order_of_steps_is_by_attempt_and_monotonic_time() -> None:
    """Steps 2 and 3 run again in attempt 1; the wall clock, which may be set, has no effect on the order."""
    rows = {"attempt": [1, 0, 1, 0, 0], "step": [3, 2, 2, 3, 1], "mono_ns": [9 * S, 2 * S, 8 * S, 3 * S, 1 * S]}
    taken = in_execution_order({name: np.asarray(values) for name, values in rows.items()})
    assert taken["step"].tolist() == [1, 2, 3, 2, 3]
    assert taken["mono_ns"].tolist() == [1 * S, 2 * S, 3 * S, 8 * S, 9 * S]


def test_begins_are_monotonic_though_the_wall_clock_was_set_between_two_tapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, opened = time.time_ns, itertools.count()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * S * (next(opened) % 2))
    run = make_run(tmp_path, ranks=1, steps=5)
    monkeypatch.undo()
    with Store.open(run) as store:
        starts_ns = store.query("SELECT start_ns FROM steps ORDER BY step")["start_ns"].tolist()
    (path,) = segment_paths(run.rank_dir(0, 0), "steps")
    assert [step_starts(run)[start_ns] for start_ns in starts_ns] == read_segment(path).records["start_ns"].tolist()


def test_a_fault_is_named_in_time_though_the_wall_clock_was_set_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = empty_run(tmp_path)
    rank = RankWriter(run, 2)
    rank.events.write("fault_injected", step=7, fault="kill")
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * S)
    run.node_dir(0).mkdir(parents=True)
    watch = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=-1)
    for severity in ("critical", "info"):
        watch.write(
            "finding", status="fired", severity=severity, finding_kind="rank_lost", finding_ranks=[2], summary="Died."
        )
    judged = match(*faults_and_findings(run))
    assert judged == {"asked": 1, "seen": 1, "right_rank": 1, "not_right": [], "unexplained": []}
