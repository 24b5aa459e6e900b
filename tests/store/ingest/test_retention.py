"""Retention: older calls become totals and ingested tapes go; neither a rebuild nor another schema loses rows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from probes.tape.events import EventWriter, read_events
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, OPEN, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester, Store, rebuild
from store.ingest import store_file
from store.ingest.retention import KEPT_STEPS
from tests.factories import RankWriter, empty_run
from watch.records.retention import Retention, RetentionPolicy
from watch.records.tape_sync import TapeSync

STEPS, CALLS = 500, 3
SECOND = 10**9
COUNTED = ("steps", "collectives", "collective_totals", "events")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A step a second, the last one now; tapes of few records a segment, and one call in flight."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    began_ns, wall_ns = writer.now_ns - STEPS * SECOND, time.time_ns() - STEPS * SECOND
    with monkeypatch.context() as clock:
        for table in ("steps", "collectives"):
            small = replace(TABLES[table], segment_bytes=8192)
            writer.tapes[table] = TapeWriter(
                writer.directory, small, rank=0, attempt=0, clock_ns=lambda: began_ns + step * SECOND
            )
        for step in range(STEPS):
            clock.setattr(time, "time_ns", lambda step=step: wall_ns + step * SECOND)
            begin_ns = began_ns + step * SECOND
            for seq in range(CALLS):
                times = {"issue_ns": begin_ns + seq, "end_ns": begin_ns + seq + 100, "wait_ns": 7, "bytes": 1000}
                writer.append("collectives", COMPLETE, step=step, seq=step * CALLS + seq, op="all_reduce", **times)
            writer.append("steps", COMPLETE, step=step, start_ns=begin_ns, duration_ns=SECOND)
        writer.append("collectives", OPEN, step=STEPS, seq=STEPS * CALLS, op="all_reduce", issue_ns=writer.now_ns)
    return run


def counts(run: RunDir, *, catch_up: bool = True) -> dict[str, int]:
    with Store.open(run, catch_up=catch_up) as store:
        return {table: int(store.rows(f"SELECT count(*) FROM {table}")[0][0]) for table in COUNTED}


def problems(run: RunDir) -> dict[str, str]:
    with Store.open(run) as store:
        return dict(store.rows("SELECT * FROM ingest_problems"))


def retire(run: RunDir, *, before_ns: int = 0) -> list[str]:
    """Ingest, retire what is older (100 s); returns the segments that were removed."""
    syncing = TapeSync(run)
    syncing.sync(last=True)
    with Ingester(run) as ingester:
        ingester.tick()
        segments = ingester.retire(before_ns or time.time_ns() - 100 * SECOND)
        syncing.retire(segments)
        assert ingester.tick().num_rows == 0
    return list(segments)


def test_older_calls_become_totals_that_add_up(run: RunDir) -> None:
    retire(run)
    with Store.open(run) as store:
        ((raw, raw_bytes, oldest),) = store.rows("SELECT count(*), sum(bytes), min(step) FROM collectives")
        ((calls, total_bytes, wait_ns, duration_ns),) = store.rows(
            "SELECT sum(calls), sum(bytes), sum(wait_ns), sum(duration_ns) FROM collective_totals"
        )
        ((in_flight,),) = store.rows("SELECT count(*) FROM collectives WHERE end_ns IS NULL")
        kept = {step for (step,) in store.rows("SELECT DISTINCT step FROM collectives WHERE step < 300")}
        per_step = store.rows("SELECT DISTINCT calls FROM collective_totals")
    assert calls + raw == STEPS * CALLS + 1
    assert total_bytes + raw_bytes == STEPS * CALLS * 1000
    assert (wait_ns, duration_ns) == (calls * 7, calls * 100)
    assert in_flight == 1
    assert per_step == [(CALLS,)], "no step is half there"
    assert oldest == 0
    assert kept == set(range(0, 300, KEPT_STEPS)), "a sample covers the whole run"


def test_retired_segments_are_no_damage_and_a_rebuild_keeps_their_rows(run: RunDir) -> None:
    cutoff_ns = time.time_ns() - 100 * SECOND
    removed = retire(run, before_ns=cutoff_ns)
    assert len(removed) > 20
    assert not any((run.path / name).exists() for name in removed)
    before = counts(run)
    assert before["steps"] == STEPS
    assert problems(run) == {}
    assert rebuild(run).problems == ()
    assert counts(run) == before
    assert retire(run, before_ns=cutoff_ns) == [], "and again nothing is due"


def test_a_store_of_another_version_hands_its_rows_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    retire(run)
    before = counts(run)
    with monkeypatch.context() as other:
        other.setattr(store_file, "fingerprint", lambda: "another")
        with Ingester(run) as ingester:
            assert ingester.tick().quarantined is not None
    assert counts(run, catch_up=False) == before


def test_a_missing_store_with_retired_rows_is_named(run: RunDir) -> None:
    removed = retire(run)
    run.store().unlink()
    named = problems(run)
    assert {name.removesuffix("#checksum") for name in named} >= set(removed)
    assert all("was retired, and the store" in text for name, text in named.items() if name.endswith("#checksum"))
    with pytest.raises(AssertionError):
        assert counts(run)["steps"] == STEPS


def test_a_budget_shortens_the_window_and_says_when_it_cannot(run: RunDir) -> None:
    path = run.node_dir(0) / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    events = EventWriter(path, attempt=0, rank=NODE_RANK)
    with Ingester(run) as ingester:
        ingester.tick()
        policy = RetentionPolicy(window_s=400.0, budget_bytes=1000.0)
        retention = Retention(run, ingester, TapeSync(run), events, policy)
        for _ in range(5):
            retention.retire()
            ingester.tick()
        assert retention.window_s == 60.0
    kinds = [event["kind"] for event in read_events(path)[0]]
    assert kinds.count("budget_exceeded") == 1
    assert "records_retired" in kinds
    with Store.open(run) as store:
        ((first,),) = store.rows("SELECT min(step) FROM collectives WHERE step % 64 <> 0")
    assert first >= STEPS - 65, "the window is a minute now"
