"""Retired segments between two that are there: no gap, where an older one stays because a step in it is open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from probes.tape.rundir import RunDir
from probes.tape.schema import TABLES
from probes.tape.writer import COMPLETE, OPEN, TapeWriter, segment_name
from store import Ingester, Store, rebuild
from tests.factories import RankWriter, empty_run
from watch.records.tape_sync import TapeSync

STEPS = 500


def problems(run: RunDir) -> dict[str, str]:
    with Store.open(run) as store:
        return dict(store.rows("SELECT * FROM ingest_problems"))


def test_segments_retired_behind_an_open_step_are_not_missing(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    small = replace(TABLES["steps"], segment_bytes=8192)
    writer.tapes["steps"] = TapeWriter(writer.directory, small, rank=0, attempt=0, clock_ns=lambda: writer.now_ns)
    writer.append("steps", OPEN, step=0, start_ns=writer.now_ns)
    for step in range(1, STEPS):
        writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns, duration_ns=1)
    syncing = TapeSync(run)
    syncing.sync(last=True)
    with Ingester(run) as ingester:
        ingester.tick()
        retired = ingester.retire(1 << 62)
        lost, _ = retired.popitem()
        syncing.retire(retired)
    folder = "tapes/attempt-0/rank-00000"
    assert f"{folder}/{segment_name('steps', 0)}" not in retired
    assert len(retired) > 3
    assert problems(run) == {}
    assert rebuild(run).problems == ()

    (run.path / lost).unlink()
    assert {name.partition("#")[0] for name in problems(run)} == {lost}, "one that was not retired is still named"
