"""Retention counts the time of the records: neither a wall clock that is set nor a pause of days counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from probes.tape.events import EventWriter
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester, Store
from store.ingest.retention import KEPT_STEPS
from tests.factories import RankWriter, empty_run
from watch.records.retention import Retention, RetentionPolicy
from watch.records.tape_sync import TapeSync

STEPS = 500
WINDOW_S = 100.0
HOUR_S, DAY_S = 3600, 86400


def record(run: RunDir, *, attempt: int = 0, step_s: float = 1.0) -> None:
    """Steps with a call each, the last one now."""
    writer = RankWriter(run, 0, attempt=attempt)
    for step in range(STEPS):
        start_ns = writer.now_ns - int((STEPS - step) * step_s * 1e9)
        times = {"issue_ns": start_ns, "end_ns": start_ns + 100}
        writer.append("collectives", COMPLETE, step=step, seq=step, op="all_reduce", **times)
        writer.append("steps", COMPLETE, step=step, start_ns=start_ns, duration_ns=100)
    writer.close()


def set_wall_clock(monkeypatch: pytest.MonkeyPatch, by_s: int) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + by_s * 10**9)


def used_bytes(run: RunDir) -> int:
    return sum(path.lstat().st_blocks * 512 for path in run.path.rglob("*"))


def window_s(run: RunDir, *, budget_bytes: float = 0.0) -> float:
    """Ingest and retire; returns the window that the budget leaves."""
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    with Ingester(run) as ingester:
        ingester.catch_up()
        budget_bytes *= used_bytes(run)
        policy = RetentionPolicy(window_s=WINDOW_S, budget_bytes=budget_bytes)
        retention = Retention(run, ingester, TapeSync(run), events, policy)
        retention.retire()
    events.close()
    return retention.window_s


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_a_wall_clock_that_is_set_moves_no_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_s: int
) -> None:
    run = empty_run(tmp_path)
    record(run)
    set_wall_clock(monkeypatch, set_by_s)
    window_s(run)
    with Store.open(run) as store:
        ((oldest,),) = store.rows(f"SELECT min(step) FROM collectives WHERE step % {KEPT_STEPS} <> 0")
    assert oldest == STEPS - 1 - WINDOW_S


@pytest.mark.parametrize(("step_s", "expected_s"), [(1.0, 60.0), (60.0, WINDOW_S)])
def test_a_budget_counts_the_hours_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, expected_s: float
) -> None:
    """One attempt two days ago, one now; of 8 minutes each, or of 8 hours."""
    with monkeypatch.context() as clock:
        set_wall_clock(clock, -2 * DAY_S)
        run = empty_run(tmp_path)
        record(run, step_s=step_s)
    record(run, attempt=1, step_s=step_s)
    assert window_s(run, budget_bytes=0.1) == expected_s


@pytest.mark.parametrize("set_by_s", [DAY_S, -DAY_S])
def test_a_wall_clock_that_is_set_moves_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_s: int
) -> None:
    run = empty_run(tmp_path)
    record(run, step_s=60.0)
    set_wall_clock(monkeypatch, set_by_s)
    assert window_s(run, budget_bytes=0.2) == WINDOW_S
    assert window_s(run, budget_bytes=0.1) == 60.0
