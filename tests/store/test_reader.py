"""Reading the store: answers, safety, catching up with a dead run, beside a writer."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import duckdb
import numpy as np
import pytest

import store as store_package
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreCorruptError, StoreError, catch_up
from store.database import WriterLock
from store.ingest import rank_folders
from tests.depth import tried
from tests.factories import RankWriter, empty_run, make_run
from tests.forked import ForkedPython

ROOT = Path(__file__).resolve().parents[2]
SECRET = Path("/etc/hostname")


def test_public_names() -> None:
    assert all(hasattr(store_package, name) for name in store_package.__all__)
    assert store_package.__all__ == sorted(store_package.__all__)


def test_query_gives_plain_arrays(tmp_path: Path) -> None:
    with Store.open(empty_run(tmp_path)) as store:
        found = store.query(
            """
            SELECT * FROM (VALUES
                (1::BIGINT, 1::BIGINT, 1.5::DOUBLE, true, true, 'a', TIMESTAMP '2026-01-01', [1, 2]),
                (2, NULL, NULL, false, NULL, NULL, NULL, NULL)
            ) t(whole, holes, real, flag, maybe, text, moment, list)
            """
        )
        nothing = store.query("SELECT step, loss, committed FROM steps")
    assert not any(isinstance(column, np.ma.MaskedArray) for column in (*found.values(), *nothing.values()))
    assert found["whole"].dtype == np.int64
    assert found["holes"].dtype == np.float64
    assert np.isnan(found["holes"][1])
    assert np.isnan(found["real"][1])
    assert found["flag"].dtype == np.bool_
    assert found["maybe"].tolist() == [True, None]
    assert found["text"].tolist() == ["a", None]
    assert np.isnat(found["moment"][1])
    assert found["list"][1] is None
    assert [len(column) for column in nothing.values()] == [0, 0, 0]


def test_parameters_rows_and_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps WHERE rank = ? AND step > ?", [1, 2]) == [(3,)]
        assert store.query("SELECT step FROM steps WHERE step = $s AND rank = 0", {"s": 4})["step"].tolist() == [4]
        assert set(store.tables()) == {*TABLES, "ingest_problems"}
        assert store.has("collectives")
        assert store.has("checkpoints")
        assert not store.has("nowhere")


def test_errors_are_of_one_kind(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    with pytest.raises(StoreError, match="no store yet"):
        Store.open(run, catch_up=False)
    with Store.open(run) as store, pytest.raises(StoreError, match="nowhere"):
        store.rows("SELECT * FROM nowhere")
    run.store().write_bytes(b"rubbish" * 1000)
    with pytest.raises(StoreCorruptError, match="rankscope rebuild"):
        Store.open(run, catch_up=False)


def test_a_dead_run_is_caught_up(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5, kill={1: 4})
    with Store.open(run) as store:
        assert store.rows("SELECT count(*), count(duration_ns) FROM steps") == [(8, 6)]
    make_run(tmp_path, run=run, attempt=1, ranks=2, steps=5)
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT max(attempt) FROM steps") == [(0,)]
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps WHERE attempt = 1") == [(10,)]
    shutil.rmtree(run.tapes)  # pruned, or not handed over with the store
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(18,)]


def test_only_the_live_writer_writes(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5)
    with Ingester(run) as ingester:
        ingester.tick()
        make_run(tmp_path, run=run, attempt=1, steps=5, kill={1: 3})
        with Store.open(run) as store:
            assert store.rows("SELECT max(attempt) FROM steps") == [(0,)]
        ingester.tick()
        with Store.open(run) as store:
            assert store.rows("SELECT max(attempt) FROM steps") == [(1,)]


def test_an_ended_run_with_a_remaining_writer_is_read_from_its_tapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "FINAL_POLL_S", 0.1)
    run = make_run(tmp_path, steps=5)
    with Ingester(run) as ingester:
        ingester.tick()
        written = run.store().read_bytes()
        make_run(tmp_path, run=run, attempt=1, steps=5)
        with Store.open(run) as store:
            assert store.rows("SELECT max(attempt) FROM steps") == [(1,)]
        assert run.store().read_bytes() == written, "the writer's file was written by a reader"


READ_AS_NOBODY = """
import os, random, sys, tempfile
from pathlib import Path
import duckdb, numpy.ma
from probes.tape.rundir import RunDir
from store import Store
duckdb.connect().close()
tempfile.tempdir = sys.argv[2]
os.setgid(65534)
os.setuid(65534)  # the interpreter itself may be out of reach from here on
with Store.open(RunDir.open(Path(sys.argv[1])), wait_s=1) as store:
    print(store.rows("SELECT count(*), max(attempt) FROM steps"), len(os.listdir(sys.argv[2])))
print(len(os.listdir(sys.argv[2])))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("has_store", [True, False])
def test_a_folder_that_cannot_be_written_is_read_through_a_copy(has_store: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        scratch = folder / "scratch"
        scratch.mkdir()
        scratch.chmod(0o777)
        run = make_run(folder, ranks=2, steps=5)
        if has_store:
            with Ingester(run) as ingester:
                ingester.tick()
        make_run(folder, run=run, ranks=2, attempt=1, steps=5)
        run.path.chmod(0o755)  # opened to other users, to read
        (run.path / "run.json").chmod(0o644)
        before = sorted(path.name for path in run.path.iterdir())
        found = subprocess.run(
            [sys.executable, "-c", READ_AS_NOBODY, str(run.path), str(scratch)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.stdout == "[(20, 1)] 1\n0\n", found.stderr
        assert sorted(path.name for path in run.path.iterdir()) == before


ATTACKS = (
    f"SELECT * FROM read_text('{SECRET}')",
    f"SELECT * FROM read_csv('{SECRET}')",
    f"SELECT * FROM '{SECRET}'",
    "SELECT * FROM glob('/etc/*')",
    "COPY (SELECT 1) TO '/tmp/rankscope-attack.csv'",
    "ATTACH '/tmp/rankscope-attack.duckdb'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET enable_external_access",
    "SET allowed_directories = ['/']",
    "SET autoload_known_extensions = true",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_sql_reaches_the_machine(tmp_path: Path, attack: str) -> None:
    with Store.open(empty_run(tmp_path)) as store, pytest.raises(StoreError):
        store.rows(attack)
    assert not list(Path("/tmp").glob("rankscope-attack*"))


def plant(path: Path) -> None:
    """A view that reads a file of whoever looks at it. DuckDB checks such a view when it is made, not when stored."""
    with duckdb.connect(str(path)) as connection:
        connection.execute("DROP VIEW IF EXISTS steps")
        connection.execute(f"CREATE VIEW steps AS SELECT content AS attempt FROM read_text('{SECRET}')")
        connection.execute(f"CREATE MACRO median(x) AS (SELECT content FROM read_text('{SECRET}'))")


@pytest.mark.skipif(not SECRET.exists(), reason="no file to read")
@pytest.mark.parametrize("catch_up", [True, False])
def test_a_view_inside_a_run_that_was_handed_over_reads_nothing(tmp_path: Path, catch_up: bool) -> None:
    run = make_run(tmp_path, steps=3)
    with Store.open(run):
        pass
    plant(run.store())
    secret = SECRET.read_text().strip()
    try:
        with Store.open(run, catch_up=catch_up) as store:
            found = store.rows("SELECT * FROM steps")
    except StoreError:
        return
    assert secret not in repr(found)


def test_stores_of_an_older_version_are_read_with_nulls(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=3)
    with Store.open(run):
        pass
    with duckdb.connect(str(run.store())) as connection:
        connection.execute("UPDATE ingest_meta SET fingerprint = 'older'")
        connection.execute("DROP VIEW steps")
        for part in ("steps_done", "steps_open"):
            connection.execute(f"ALTER TABLE {part} DROP COLUMN loss")
        connection.execute("DROP TABLE findings")
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT step, loss FROM steps ORDER BY step") == [(1, None), (2, None), (3, None)]
        assert store.rows("SELECT summary FROM findings") == []
        assert store.has("steps")
        assert not store.has("findings")


def test_concurrent_readers_see_whole_ticks(tmp_path: Path) -> None:
    """In one process and in another: each answer is the state between two ticks, and no tick is lost."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    stop = threading.Event()
    written = 0
    failures: list[BaseException] = []

    ingester = Ingester(run)

    def write() -> None:
        nonlocal written
        with ingester:
            while not stop.is_set():
                for _ in range(10):
                    writer.append("gradients", 2, step=written)
                    written += 1
                if ingester.tick().busy:
                    continue
            while ingester.tick().lag:
                pass

    def run_write() -> None:
        try:
            write()
        except BaseException as error:
            failures.append(error)
            raise

    other = ForkedPython(
        [
            "-c",
            "import sys\nfrom pathlib import Path\nfrom probes.tape.rundir import RunDir\nfrom store import Store\n"
            "run = RunDir.open(Path(sys.argv[1]))\n"
            "for line in sys.stdin:\n"
            "    with Store.open(run) as store:\n"
            "        print(store.rows('SELECT count(*) FROM gradients')[0][0], flush=True)\n",
            str(run.path),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    thread = threading.Thread(target=run_write)
    thread.start()
    assert other.stdin is not None
    assert other.stdout is not None
    counts = []
    try:
        for _ in range(tried(4, nightly=8)):
            other.stdin.write("\n")
            other.stdin.flush()
            counts.append(int(other.stdout.readline()))
            with Store.open(run) as store:
                counts.append(store.rows("SELECT count(*) FROM gradients")[0][0])
    finally:
        stop.set()
        thread.join()
        other.communicate()
    assert not failures
    assert counts == sorted(counts)
    assert all(count % 10 == 0 for count in counts)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*), count(DISTINCT step) FROM gradients") == [(written, written)]


def test_importing_the_store_loads_no_database() -> None:
    code = "import sys, store; assert not {'duckdb', 'torch', 'pandas', 'pyarrow'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_paths_with_quotes(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s; a "run"'
    folder.mkdir()
    run = make_run(folder, ranks=1, steps=2)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(2,)]
    assert isinstance(run, RunDir)


def test_each_folder_is_looked_into_once_however_many_nodes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 nodes that each looked through the folders of 1,024 ranks took 13 s before the first question."""
    run = empty_run(tmp_path)
    for rank in range(12):
        RankWriter(run, rank=rank, node_rank=rank // 2).append("steps", COMPLETE, step=1)
    asked: list[str] = []
    before = rank_folders.node_of
    monkeypatch.setattr(rank_folders, "node_of", lambda folder: asked.append(folder.name) or before(folder))
    with Store.open(run) as store:
        assert store.rows("SELECT count(DISTINCT rank) FROM steps") == [(12,)]
    assert len(run.stores()) == 6
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) >= 12


def test_a_session_replaces_a_relation_however_it_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    with Store.open(run) as store:
        few = store.session(steps="SELECT * FROM steps WHERE step > 15")
        fewer = few.session(steps="SELECT * FROM steps WHERE rank = 0")
        for sql in ("SELECT count(*) FROM steps", "SELECT count(*) FROM main.steps"):
            assert [s.rows(sql) for s in (store, few, fewer)] == [[(40,)], [(10,)], [(5,)]]
        comma = "SELECT count(*) FROM (SELECT 0 AS rank) one, steps WHERE steps.rank = one.rank"
        assert [s.rows(comma) for s in (store, few, fewer)] == [[(20,)], [(5,)], [(5,)]]
        assert fewer.rows("SELECT count(*) FROM spans") == store.rows("SELECT count(*) FROM spans")
        assert fewer.tables() == few.tables() == store.tables()
        with pytest.raises(StoreError):
            store.session(steps="SELECT * FROM nowhere")
        assert store.rows("SELECT count(*) FROM steps") == [(40,)]
    with pytest.raises(StoreError):
        fewer.rows("SELECT 1")


def test_a_closed_store_with_sessions_lets_writers_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    store = Store.open(run)
    few = store.session(steps="SELECT * FROM steps WHERE step = 1")
    assert few.rows("SELECT count(*) FROM steps") == [(2,)]
    store.close()
    with Ingester(run, 0, wait_s=0.5) as ingester:
        ingester.catch_up()


def test_a_lock_on_a_full_disk_is_a_store_error(tmp_path: Path) -> None:
    """The lock file can be created, but not written: `stores_up_to_date` then builds the store elsewhere."""
    run = make_run(tmp_path, ranks=2, steps=5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(StoreError, match="cannot write"):
            WriterLock(run.store(), role="reader")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    WriterLock(run.store(), role="reader").close()


def test_a_store_of_a_newer_schema_is_named_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Ingester(run) as ingester:
        ingester.catch_up()
    with duckdb.connect(str(run.store())) as connection:
        connection.execute("UPDATE ingest_meta SET schema_version = 99")
    with pytest.raises(StoreError, match="written with schema 99") as told:
        Store.open(run)
    assert str(told.value).startswith(f"{run.store()} was")
