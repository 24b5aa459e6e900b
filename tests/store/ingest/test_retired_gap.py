"""Segments that are damaged or were left open while later ones retire: no gap, and the store keeps what is open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from probes.tape.format.reader import read_header
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, HEADER_BYTES, OPEN, TapeWriter
from probes.tape.rundir import RunDir
from store import Ingester, Store, rebuild
from tests.factories import RankWriter, empty_run
from watch.records.tape_sync import TapeSync

STEPS = 500
FIRST = "tapes/attempt-0/rank-00000/steps.00000.tape"


def problems(run: RunDir) -> dict[str, str]:
    with Store.open(run) as store:
        return dict(store.rows("SELECT * FROM ingest_problems"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Steps in segments of few records, of which the first one stays open."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    small = replace(TABLES["steps"], segment_bytes=8192)
    writer.tapes["steps"] = TapeWriter(writer.directory, small, rank=0, attempt=0, clock_ns=lambda: writer.now_ns)
    writer.append("steps", OPEN, step=0, start_ns=writer.now_ns)
    for step in range(1, STEPS):
        writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns, duration_ns=1)
    return run


def retirable(run: RunDir) -> tuple[TapeSync, dict[str, int]]:
    syncing = TapeSync(run)
    syncing.sync(last=True)
    with Ingester(run) as ingester:
        ingester.tick()
        return syncing, ingester.retire(1 << 62)


def test_segments_retired_behind_a_damaged_one_are_not_missing(run: RunDir) -> None:
    damaged = run.path / FIRST
    with damaged.open("r+b") as file:
        file.seek(HEADER_BYTES + read_header(damaged).record_bytes - 1)
        file.write(b"\x07")
    syncing, retired = retirable(run)
    assert FIRST not in retired
    assert len(retired) > 3
    lost, _ = retired.popitem()
    syncing.retire(retired)
    damage = {FIRST: "1 records have a damaged state"}
    assert problems(run) == damage
    assert rebuild(run).problems == tuple(damage)

    (run.path / lost).unlink()
    named = {name.partition("#")[0] for name in problems(run)}
    assert named == {FIRST, lost}, "one that was not retired is still named"


@pytest.mark.parametrize("is_left_over", [False, True], ids=["with the others", "after the others"])
def test_a_segment_with_an_open_step_is_retired_and_the_store_keeps_the_step(run: RunDir, is_left_over: bool) -> None:
    syncing, retired = retirable(run)
    if is_left_over:  # of a version that did not retire it
        del retired[FIRST]
    syncing.retire(retired)
    syncing.retire(retirable(run)[1])
    left = [path.name for path in sorted((run.path / FIRST).parent.glob("steps.*.tape"))]
    assert 0 < len(left) < 5, "the newest"
    assert "steps.00000.tape" not in left
    for _ in range(2):
        with Store.open(run) as store:
            assert store.rows("SELECT step FROM steps WHERE duration_ns IS NULL") == [(0,)]
            assert store.rows("SELECT count(*) FROM steps") == [(STEPS,)]
        assert problems(run) == {}
        assert rebuild(run).problems == ()
