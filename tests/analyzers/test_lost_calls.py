"""Files of a rank are lost: what the store has counts, and what it lacks is not judged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis, diagnose
from probes.tape.format.reader import read_segment
from probes.tape.format.writer import HEADER_BYTES
from probes.tape.rundir import RunDir
from store import Ingester, Store
from tests.factories import make_run
from watch.records.tape_sync import TapeSync

Damage = Callable[[Path], None]


def cut_calls(folder: Path) -> None:
    tape = folder / "collectives.00000.tape"
    segment = read_segment(tape)
    os.truncate(tape, HEADER_BYTES + segment.end // 2 * segment.header.record_bytes + 7)


def blank_calls(folder: Path) -> None:
    tape = folder / "collectives.00000.tape"
    segment = read_segment(tape)
    with tape.open("r+b") as file:
        file.seek(HEADER_BYTES + segment.end // 4 * segment.header.record_bytes)
        file.write(bytes(segment.end // 2 * segment.header.record_bytes))


def remove_calls(folder: Path) -> None:
    (folder / "collectives.00000.tape").unlink()


def remove_names(folder: Path) -> None:
    (folder / "names.jsonl").unlink()


def cut_events(folder: Path) -> None:
    os.truncate(folder / "events.jsonl", (folder / "events.jsonl").stat().st_size // 2)


CALLS_LOST = [cut_calls, blank_calls, remove_calls, remove_names]


def indexed(run: RunDir) -> RunDir:
    TapeSync(run).sync(last=True)
    return run


def diagnosed(run: RunDir, now_ns: int | None = None) -> Diagnosis:
    with Store.open(run) as store:
        return diagnose(store, run.manifest(), now_ns=now_ns)


def status_of(diagnosis: Diagnosis, kind: str) -> str:
    (finding,) = (one for one in diagnosis.findings if one.kind == kind)
    return finding.status


@pytest.mark.parametrize("damage", [cut_calls, remove_calls, remove_names, cut_events])
def test_records_that_the_store_has_are_not_incomplete(tmp_path: Path, damage: Damage) -> None:
    run = indexed(make_run(tmp_path, steps=40))
    with Ingester(run) as ingester:
        ingester.catch_up()
    before = diagnosed(run)
    damage(run.rank_dir(0, 1))
    after = diagnosed(run)
    assert after.verdict == before.verdict
    assert after.damaged_records == ()
    assert after.goodput == before.goodput
    problems = [one["problem"] for one in after.run["file_problems"] if one["path"].endswith("#checksum")]  # type: ignore[attr-defined]
    assert [problem.endswith("; the store has them") for problem in problems] == [True]


@pytest.mark.parametrize("damage", CALLS_LOST)
def test_communication_is_not_judged_without_all_calls(tmp_path: Path, damage: Damage) -> None:
    run = indexed(make_run(tmp_path, steps=40))
    assert status_of(diagnosed(run), "exposed_communication") != "insufficient_data"
    run.store().unlink()
    damage(run.rank_dir(0, 1))
    diagnosis = diagnosed(run)
    assert "Records incomplete" in diagnosis.verdict
    assert status_of(diagnosis, "exposed_communication") == "insufficient_data"
    assert diagnosis.goodput is not None
    assert diagnosis.goodput.basis == "steps"


@pytest.mark.parametrize("damage", CALLS_LOST)
def test_a_rank_whose_calls_were_lost_is_not_blamed_for_a_hang(tmp_path: Path, damage: Damage) -> None:
    run = indexed(make_run(tmp_path, steps=40, hang={2: 30}, end=""))
    damage(run.rank_dir(0, 1))
    found = diagnosed(run, now_ns=time.time_ns() + 600 * 1_000_000_000)
    (hang,) = (one for one in found.findings if one.kind == "hang")
    assert 1 not in hang.ranks
