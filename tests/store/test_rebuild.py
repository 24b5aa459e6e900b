"""A rebuild loses no row that it does not name, and leaves a store alone that somebody has open."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, HEADER_BYTES, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.segment_index import INDEX_NAME
from rankscope.cli import app
from store import Ingester, Store, StoreBusyError, StoreError, rebuild
from store.ingest.tail import NO_INDEX
from tests.depth import later
from tests.factories import RankWriter, empty_run
from watch.records.tape_sync import TapeSync

STEPS = 300
DURATION_NS = 1000
WRITE_AND_WAIT = """
import sys, duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute("INSERT INTO ingest_problems VALUES ('a file', 'a problem')")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> RankWriter:
    """A run with 300 steps in segments of few records, and as many notes."""
    writer = RankWriter(empty_run(tmp_path), 0)
    small = replace(TABLES["steps"], segment_bytes=8192)
    writer.tapes["steps"] = TapeWriter(writer.directory, small, rank=0, attempt=0, clock_ns=time.monotonic_ns)
    add_steps(writer, 0, STEPS)
    return writer


@pytest.fixture
def run(writer: RankWriter) -> RunDir:
    """The run, all of it in its store and in the index of checksums."""
    TapeSync(writer.run).sync(last=True)
    with Ingester(writer.run) as ingester:
        ingester.catch_up()
    return writer.run


def add_steps(writer: RankWriter, first: int, count: int) -> None:
    for step in range(first, first + count):
        writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns, duration_ns=DURATION_NS)
        writer.event("note", step=step, wall_ns=step)


def segments(run: RunDir) -> list[Path]:
    return sorted(run.rank_dir(0, 0).glob("steps.*.tape"))


def blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def rows(path: Path, query: str = "SELECT count(*), min(step) FROM steps") -> list[tuple[int, ...]]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute(query).fetchall()


def files(run: RunDir) -> dict[str, tuple[int, int]]:
    """What is beside the store, without what is in it."""
    return {path.name: (path.stat().st_ino, path.stat().st_size) for path in run.path.glob("telemetry.duckdb*")}


@contextmanager
def held_open(store: Path) -> Iterator[None]:
    """Another process has the store open for writing, with something in its write-ahead log."""
    holder = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_WAIT, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        yield


def retire_first(run: RunDir) -> None:
    """Remove the first segments, whose rows the store has alone then."""
    syncing = TapeSync(run)
    with Ingester(run) as ingester:
        ingester.tick()
        retired = ingester.retire(time.time_ns())
        syncing.retire(retired)
    assert len(retired) > 2


@pytest.mark.parametrize(
    ("is_retired", "options"),
    [
        pytest.param(True, [], id="retired-plain", marks=later("each of both: the two cases below")),
        pytest.param(True, ["--force"], id="retired-forced"),
        pytest.param(False, [], id="whole-plain"),
        pytest.param(False, ["--force"], id="whole-forced", marks=later("each of both: the two cases above")),
    ],
)
def test_a_store_that_is_open_elsewhere_is_left_alone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, options: list[str], is_retired: bool
) -> None:
    if is_retired:
        retire_first(run)
    monkeypatch.setattr(importlib.import_module("store.rebuilding"), "WAIT_S", 0.1)
    with held_open(run.store()):
        before = files(run)
        assert "telemetry.duckdb.wal" in before
        with pytest.raises(StoreBusyError):
            rebuild(run, force=bool(options))
        done = CliRunner().invoke(app, ["rebuild", str(run.path), *options])
        assert files(run) == before
    assert done.exit_code == 2
    (line,) = done.output.strip().splitlines()
    assert "telemetry.duckdb is in use" in line
    assert line.endswith("it was left unchanged. Close the programs that have it open, then rebuild again")
    assert rebuild(run).kept == ()
    assert rows(run.store()) == [(STEPS, 0)]


def test_a_store_that_is_whole_and_cannot_be_opened_is_left_alone(run: RunDir) -> None:
    run.store().unlink()
    with duckdb.connect() as connection:
        connection.execute("SET force_mbedtls_unsafe = 'true'")  # DuckDB's own cipher, without its extension
        connection.execute(f"ATTACH '{run.store()}' AS store (ENCRYPTION_KEY 'key')")
        connection.execute("CREATE TABLE store.steps AS SELECT 1 AS step")
    before = files(run)
    with pytest.raises(StoreError, match=r"it was left unchanged\. To rebuild without its rows, move it away$"):
        rebuild(run, force=True)
    assert files(run) == before


def test_a_store_without_a_table_is_replaced(run: RunDir) -> None:
    run.store().unlink()
    duckdb.connect(str(run.store())).close()
    assert rebuild(run).kept == ()
    assert rows(run.store()) == [(STEPS, 0)]


def test_new_records_do_not_make_up_for_lost_ones(writer: RankWriter, run: RunDir) -> None:
    add_steps(writer, STEPS, 100)
    for path in segments(run)[:2]:
        blank(path)
    with pytest.raises(StoreError, match=r"no longer have \(steps \d\d -> 0\); it was left unchanged"):
        rebuild(run)
    assert rows(run.store()) == [(STEPS, 0)]
    result = rebuild(run, force=True)
    assert rows(run.store())[0][0] > STEPS, "more than before, and not all of those before"
    assert [rows(path) for path in result.kept] == [[(STEPS, 0)]]


def test_new_events_do_not_make_up_for_lost_ones(writer: RankWriter, run: RunDir) -> None:
    add_steps(writer, STEPS, 100)
    path = writer.directory / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10] + lines[20:]))
    with pytest.raises(StoreError, match=r"no longer have \(events 10 -> 0\)"):
        rebuild(run)


def test_a_rank_does_not_make_up_for_another(writer: RankWriter, run: RunDir) -> None:
    add_steps(RankWriter(run, 1), 0, STEPS)
    for path in segments(run):
        path.unlink()
    with pytest.raises(StoreError, match=r"no longer have \(steps 300 -> 0\)"):
        rebuild(run)


@pytest.mark.parametrize("is_known", [False, True], ids=["found by the rebuild", "known before"])
def test_a_store_with_other_values_than_an_altered_tape_is_kept(run: RunDir, is_known: bool) -> None:
    path = segments(run)[0]
    place = path.read_bytes().index(DURATION_NS.to_bytes(8, "little"), HEADER_BYTES)
    with path.open("r+b") as file:
        file.seek(place + 5)
        file.write(b"\x40")
    if is_known:
        with Store.open(run) as store:
            assert store.rows("SELECT count(*) FROM ingest_problems") == [(1,)]
    done = CliRunner().invoke(app, ["rebuild", str(run.path)])
    assert done.exit_code == 0
    kept = run.path / "telemetry.duckdb.quarantine"
    assert f"The former store is kept as {kept}." in done.output
    assert f"Records incomplete: {path.relative_to(run.path)}#checksum" in done.output
    total = "SELECT sum(duration_ns) FROM steps"
    assert rows(kept, total) == [(STEPS * DURATION_NS,)]
    assert rows(run.store(), total) > rows(kept, total)
    again = rebuild(run)
    assert len(again.problems) == 1
    assert again.kept == (), "the tapes are as damaged as before, and this store has nothing else"


@pytest.mark.parametrize("has_store", [True, False])
def test_records_that_no_index_covers_are_named(run: RunDir, has_store: bool) -> None:
    """A tape is altered and the index of checksums is gone: that is named, and another store is kept."""
    index = run.node_dir(0) / INDEX_NAME
    watch = TapeWriter(run.node_dir(0), TABLES["health"], rank=NODE_RANK, attempt=0)
    watch.append(COMPLETE, *watch.unset_row())
    with closing(EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)) as events:
        events.write(event_kinds.WATCH_STOPPED, pid=1)
    with Store.open(run) as store:
        assert store.rows("SELECT * FROM ingest_problems") == []
    if not has_store:
        run.store().unlink()
    path, blob = segments(run)[0], index.read_bytes()
    place = path.read_bytes().index(DURATION_NS.to_bytes(8, "little"), HEADER_BYTES)
    with path.open("r+b") as file:
        file.seek(place + 5)
        file.write(b"\x40")
    index.unlink()
    name = f"{index.relative_to(run.path)}#checksum"
    for _ in range(2):
        result = rebuild(run)
        assert result.problems == (name,)
        with Store.open(run) as store:
            assert store.rows("SELECT * FROM ingest_problems") == [(name, NO_INDEX)]
        assert len(list(run.path.glob("*.quarantine"))) == has_store, "the store with the values before"
    index.write_bytes(blob)
    with Store.open(run) as store:
        found = dict(store.rows("SELECT * FROM ingest_problems"))
    assert name not in found
    assert "was altered" in found[f"{path.relative_to(run.path)}#checksum"]


def test_a_run_that_never_had_an_index_lacks_none(writer: RankWriter) -> None:
    assert rebuild(writer.run).problems == ()


def test_a_log_that_a_checkpoint_has_made_useless_costs_no_record_of_retired_tapes(run: RunDir) -> None:
    retire_first(run)
    log = run.store().with_name(run.store().name + ".wal")
    with held_open(run.store()):
        useless = log.read_bytes()
    duckdb.connect(str(run.store())).close()  # which takes the log into the file
    log.write_bytes(useless)
    assert rebuild(run).kept == ()
    assert rows(run.store()) == [(STEPS, 0)]
