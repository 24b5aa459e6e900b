"""Exactly once, whatever happens to the ingester, the store or the tapes."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreError, StoreLockedError, is_watched, rebuild
from store.database import WriterLock
from store.ingest import ingest as ingest_module
from store.ingest import store_file
from store.ingest.rank_folders import NodeFolders
from store.ingest.read_positions import ReadState
from store.ingest.tail import NewRecords, Tail
from tests.factories import RankWriter, empty_run, make_run
from tests.forked import ForkedPython

ROOT = Path(__file__).resolve().parents[3]

INGEST_FOREVER = """
import sys
from pathlib import Path
from probes.tape.rundir import RunDir
from store import Ingester, ingest
ingest.TICK_BYTES = 20_000                        # many transactions
with Ingester(RunDir.open(Path(sys.argv[1]))) as ingester:
    print("ready", flush=True)
    while True:
        ingester.tick()
"""

WRITE_AND_COUNT = """
import sys
from pathlib import Path
from probes.tape.rundir import RunDir
from probes.tape.format.writer import COMPLETE, OPEN
from tests.factories import RankWriter
writer = RankWriter(RunDir.open(Path(sys.argv[1])), rank=0)
for number in range(10**9):
    slot = writer.append("collectives", OPEN, step=number, seq=number, op=f"op{number % 50}")
    writer.complete("collectives", slot, end_ns=number)
    if number % 100 == 0:
        print(number, flush=True)
"""


def contents(run: RunDir) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, in one order."""
    with Store.open(run, catch_up=False) as store:
        return {name: sorted(map(repr, store.rows(f"SELECT * FROM {name}"))) for name in TABLES}


def in_background(code: str, *arguments: object, **options: Any) -> ForkedPython:
    return ForkedPython(["-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def test_a_killed_ingester_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments while a rank writes; in the end each record is there once."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    dice = random.Random(11)
    number = 0

    def write(count: int) -> None:
        nonlocal number
        for _ in range(count):
            slot = writer.append("collectives", OPEN, seq=number, op=f"op{number % 7}")
            if number % 10:
                writer.complete("collectives", slot, end_ns=number)
            writer.event("checkpoint", step=number) if number % 20 == 0 else None
            number += 1

    for _ in range(4):
        process = in_background(INGEST_FOREVER, run.path)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + dice.uniform(0.05, 0.4)
        while time.monotonic() < deadline:
            write(50)
        process.kill()
        process.wait()
        process.stdout.close()
    with Store.open(run) as store:
        assert store.rows("SELECT count(*), count(DISTINCT seq), max(seq) FROM collectives") == [
            (number, number, number - 1)
        ]
        open_seqs = store.rows("SELECT count(*), count(*) FILTER (seq % 10 = 0) FROM collectives WHERE end_ns IS NULL")
        assert open_seqs == [((number + 9) // 10,) * 2]
        assert store.rows("SELECT count(*), count(DISTINCT step) FROM checkpoints") == [((number + 19) // 20,) * 2]
    incremental = contents(run)
    rebuild(run)
    assert contents(run) == incremental


def test_what_an_unchanged_store_has_read_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs", steps=3)
    with Store.open(run) as store:
        assert store.rows("SELECT max(step) FROM steps") == [(3,)]
    opened = list[Path]()
    connect = store_file.connect_attached

    def counting(paths: dict[str, Path], *, wait_s: float) -> duckdb.DuckDBPyConnection:
        opened.extend(paths.values())
        return connect(paths, wait_s=wait_s)

    monkeypatch.setattr(store_file, "connect_attached", counting)
    with Store.open(run) as store:
        assert store.rows("SELECT max(step) FROM steps") == [(3,)]
    assert opened == []
    with duckdb.connect(str(run.store())) as connection:  # another process has written it
        connection.execute("UPDATE ingest_meta SET generation = generation + 1")
    with Store.open(run) as store:
        assert store.rows("SELECT max(step) FROM steps") == [(3,)]
    assert opened == [run.store()]


def test_a_killed_rank_keeps_all_its_records(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    process = in_background(WRITE_AND_COUNT, run.path)
    assert process.stdout is not None
    told = 0
    with Ingester(run) as ingester:
        while told < 3000:
            told = int(process.stdout.readline())
            if told % 700 == 0:
                ingester.tick()
    process.send_signal(signal.SIGKILL)
    told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
    process.wait()
    with Store.open(run) as store:
        ((count, distinct, top, finished),) = store.rows(
            "SELECT count(*), count(DISTINCT seq), max(seq), count(end_ns) FROM collectives"
        )
        assert store.rows("SELECT count(*) FROM collectives WHERE op <> 'op' || (seq % 50)") == [(0,)]
    assert count == distinct == top + 1
    assert top >= told
    assert finished >= count - 1


def test_ticks_and_rebuild_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two attempts, with gradients, a NaN, open records; by small and by large transactions."""
    run = make_run(tmp_path, ranks=3, steps=30, gradients_every=5, nan={1: 7}, kill={2: 25})
    with Ingester(run) as ingester:
        ingester.tick()
        make_run(tmp_path, run=run, attempt=1, ranks=3, first_step=20, steps=25)
        ingester.tick()
    once = contents(run)
    assert len(once["steps"]) == 3 * 25 + 3 * 25
    monkeypatch.setattr(ingest_module, "TICK_BYTES", 20_000)
    calls: list[tuple[int, int]] = []
    result = rebuild(run, progress=lambda done, total: calls.append((done, total)))
    assert contents(run) == once
    assert result.problems == ()
    assert result.rows["steps"] == 3 * 24 + 3 * 25
    assert len(calls) > 2
    assert calls == sorted(calls)
    run.store().unlink()
    with Ingester(run) as ingester:
        assert ingester.tick().lag
        ingester.catch_up()
    assert contents(run) == once


def test_idle_ticks_leave_the_store_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10, kill={1: 9})
    with Ingester(run) as ingester:
        ingester.tick()
        before = run.store().stat()
        for _ in range(40):
            assert ingester.tick().num_rows == 0
    with Store.open(run):
        pass  # one that catches up finds nothing to do either
    after = run.store().stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_a_store_deleted_beneath_its_ingester_comes_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20)
    with Ingester(run) as ingester:
        ingester.tick()
        before = contents(run)
        run.store().unlink()
        assert ingester.tick().rows["steps"] == 80
        assert contents(run) == before
        assert ingester.tick().num_rows == 0


def test_a_new_rank_a_new_attempt_and_a_new_table_are_noticed(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    with Ingester(run) as ingester:
        assert ingester.tick().num_rows == 0
        for attempt, rank in ((0, 0), (0, 1), (1, 0)):
            writer = RankWriter(run, rank=rank, attempt=attempt)
            writer.append("steps", COMPLETE, step=1)
            assert ingester.tick().rows["steps"] == 1
            writer.append("gradients", COMPLETE, step=1)
            assert ingester.tick().rows == {"gradients": 1}


def test_tapes_of_an_old_attempt_are_still_looked_at(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    old, new = RankWriter(run, rank=0, attempt=0), RankWriter(run, rank=0, attempt=1)
    for writer in (old, new):
        writer.append("steps", COMPLETE, step=1)
    with Ingester(run) as ingester:
        assert ingester.tick().rows["steps"] == 2
        old.append("steps", COMPLETE, step=2)
        assert sum(ingester.tick().rows.get("steps", 0) for _ in range(20)) == 1


def test_the_last_records_of_an_attempt_are_read_though_the_next_began_within_a_tick(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    old = RankWriter(run, rank=0, attempt=0)
    old.append("steps", COMPLETE, step=1)
    with Ingester(run) as ingester:
        for _ in range(3):
            ingester.tick()
        old.append("steps", COMPLETE, step=2)
        RankWriter(run, rank=0, attempt=1).append("steps", COMPLETE, step=2)
        assert ingester.tick().rows["steps"] == 2


def test_a_step_is_read_before_what_was_written_in_it(tmp_path: Path) -> None:
    """What is read is no moment of a rank's life: an analyzer must know in which order it was."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    for table in ("spans", "collectives", "steps", "gradients"):
        writer.append(table, COMPLETE, step=1)
    changes = Tail(run, NodeFolders(run, 0)).changes(ReadState(), tick=1, thorough=False)
    tables = [new.position.table for new in changes if isinstance(new, NewRecords)]
    assert tables == ["steps", "collectives", "gradients", "spans"]


def test_only_one_writer(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    process = in_background(INGEST_FOREVER, run.path)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(StoreLockedError, match=rf"already has a writer: watch, process {process.pid}"):
        Ingester(run)
    with pytest.raises(StoreLockedError):
        rebuild(run)
    process.kill()
    process.wait()
    process.stdout.close()
    Ingester(run).close()


def test_a_reader_that_catches_up_is_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5)
    catching_up = Ingester(run, role="reader")
    timer = threading.Timer(0.1, catching_up.close)
    timer.start()
    with Ingester(run) as ingester:
        assert ingester.tick().rows["steps"] == 20
    timer.join()


def test_a_reader_that_catches_up_is_no_watch_and_holds_up_nobody_who_asks(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    stores = [run.store(node) for node in range(3)]
    with contextlib.ExitStack() as locks:
        for store in stores:
            locks.enter_context(WriterLock(store, role="reader"))
        began_s = time.monotonic()
        assert not is_watched(stores)
        assert time.monotonic() - began_s < 30.0
    with WriterLock(stores[2], role="watch"):
        assert is_watched(stores)


def test_a_store_held_by_a_reader_is_written_later(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5)
    code = (
        "import sys\nfrom pathlib import Path\nfrom probes.tape.rundir import RunDir\nfrom store import Store\n"
        "with Store.open(RunDir.open(Path(sys.argv[1]))) as store:\n"
        "    print(store.rows('SELECT count(*) FROM steps')[0][0], flush=True)\n    sys.stdin.read()\n"
    )
    with Store.open(run):
        pass
    reader = in_background(code, run.path, stdin=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "20\n"
    with Ingester(run, wait_s=0.05) as ingester:
        make_run(tmp_path, run=run, attempt=1, steps=5)
        result = ingester.tick()
        assert result.busy
        assert result.lag
        assert result.num_rows == 0
        with Store.open(run, catch_up=False) as beside:  # readers do not shut each other out
            assert beside.rows("SELECT count(*) FROM steps") == [(20,)]
        for wait_s in (0.1, 0.2, 0.4):  # readers that take turns leave gaps: each tick waits longer for one
            assert ingester.tick().duration_s >= wait_s
        reader.communicate()
        assert ingester.tick().rows["steps"] == 20


@pytest.mark.parametrize("damage", ["garbage", "truncated", "flipped", "empty", "foreign", "older"])
def test_an_unusable_store_is_set_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, steps=10)
    with Ingester(run) as ingester:
        ingester.tick()
    before = contents(run)
    path = run.store()
    blob = path.read_bytes()
    if damage == "foreign":
        path.unlink()
        duckdb.connect(str(path)).execute("CREATE TABLE steps (a INTEGER)").close()
    elif damage == "older":
        duckdb.connect(str(path)).execute("UPDATE ingest_meta SET fingerprint = 'another'").close()
    else:
        flipped = blob[:4200] + bytes(byte ^ 255 for byte in blob[4200:9000]) + blob[9000:]
        broken = {"garbage": b"no database" * 4000, "truncated": blob[:20_000], "flipped": flipped, "empty": b""}
        path.write_bytes(broken[damage])
    with Ingester(run) as ingester:
        result = ingester.tick()
        assert result.rows["steps"] == 40
        assert result.quarantined == (path.parent / "telemetry.duckdb.quarantine" if damage != "empty" else None)
        assert not ingester.tick().quarantined
    assert contents(run) == before
    with Store.open(run) as store:
        problems = dict(store.rows("SELECT path, problem FROM ingest_problems"))
    if damage == "older":  # nothing was wrong with it
        assert problems == {}
    else:  # every report says it, not only that of the process that met it
        where = "" if damage == "empty" else "set aside as telemetry.duckdb.quarantine, "
        assert problems.keys() == {path.name}
        assert problems[path.name].endswith(f"; {where}rebuilt from the tapes")
        assert str(tmp_path) not in problems[path.name]


def test_a_store_of_a_newer_rankscope_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5)
    with Ingester(run) as ingester:
        ingester.tick()
    duckdb.connect(str(run.store())).execute("UPDATE ingest_meta SET schema_version = 99").close()
    with Ingester(run) as ingester, pytest.raises(StoreError, match=r"schema 99.*update rankscope"):
        ingester.tick()
    assert not list(run.path.glob("*.quarantine"))


TICK_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from probes.tape.rundir import RunDir
from store import Ingester, StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDir.open(Path(sys.argv[1]))
with Ingester(run) as ingester:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), hard))
    for _ in range(3):
        try:
            ingester.tick()
            print("written")
        except StoreError as error:
            print("refused" if "free some space" in str(error) else error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(ingester.catch_up()["steps"])
"""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("long"), steps=1000)


@pytest.mark.parametrize("limit", [0, 5_000, 100_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, long_run: RunDir, limit: int) -> None:
    run = RunDir.open(shutil.copytree(long_run.path, tmp_path / "run"))
    process = in_background(TICK_WITHOUT_ROOM, run.path, limit)
    output, _ = process.communicate()
    assert output == "refused\n" * 3 + "4000\n"
    assert not list(run.path.glob("*.quarantine*"))
    with Store.open(run) as store:
        assert store.rows("SELECT count(*), count(DISTINCT (rank, step)) FROM steps") == [(4000, 4000)]


def test_nodes_that_share_a_folder_ingest_their_own_ranks(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    for rank in range(4):
        RankWriter(run, rank=rank, node_rank=rank // 2).append("steps", COMPLETE, step=1)
    for node in range(2):
        run.node_dir(node).mkdir(parents=True)
        (run.node_dir(node) / "events.jsonl").write_text('{"kind": "watch_started", "rank": -1, "attempt": 0}\n')
        with Ingester(run, node) as ingester:
            assert ingester.tick().rows == {"steps": 2, "ranks": 2, "events": 3}
    with Store.open(run) as store:
        assert store.rows("SELECT rank FROM steps ORDER BY rank") == [(0,), (1,), (2,), (3,)]
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'watch_started'") == [(2,)]
    run.store(1).unlink()
    rebuild(run)
    assert len(run.stores()) == 2
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(4,)]
