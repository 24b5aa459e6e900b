"""Records of a small run are copied when its store is opened; those of a large one are read from its files."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from probes.tape.format.schema import TABLES
from probes.tape.rundir import RunDir
from store import Store, views
from tests.factories import make_run, still_training


def rows_of(run: RunDir) -> dict[str, list[str]]:
    with Store.open(run, catch_up=False) as store:
        return {name: sorted(map(repr, store.rows(f"SELECT * FROM {name}"))) for name in (*TABLES, "ingest_problems")}


def kinds_of(store: Store) -> set[str]:
    sql = "SELECT table_type FROM information_schema.tables WHERE table_catalog = current_database()"
    return {kind for (kind,) in store.rows(f"{sql} AND table_name IN ('steps', 'collectives', 'events')")}


def compares_all_pairs(store: Store, sql: str) -> bool:
    plan = str(store.rows(f"EXPLAIN {sql}")).lower()
    assert "hash join" in plan
    return "cross product" in plan


@pytest.mark.parametrize("is_live", [False, True])
def test_copies_are_the_records_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    run = make_run(tmp_path, ranks=4, steps=20, nan={1: 12}, gradients_every=5)
    run = still_training(run) if is_live else run
    Store.open(run).close()
    copied = rows_of(run)
    assert len(copied["steps"]) >= 4 * 19
    monkeypatch.setattr(views, "_FEW_ROWS", -1)
    assert rows_of(run) == copied


def test_few_rows_are_copied_and_many_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    with Store.open(run) as store:
        assert kinds_of(store) == {"BASE TABLE"}
    monkeypatch.setattr(views, "_FEW_ROWS", 3)
    with Store.open(run) as store:
        assert kinds_of(store) == {"VIEW"}


def test_texts_that_take_much_memory_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    settings = "SELECT current_setting('memory_limit'), current_setting('temp_directory')"
    with Store.open(run) as store:
        before = store.rows(settings)
    with duckdb.connect(str(run.store(0))) as file:
        file.execute("INSERT INTO events (attempt, rank, kind) SELECT 0, 0, repeat('a', 1000000) FROM range(50)")
    monkeypatch.setattr(views, "_COPY_MEMORY", "30MB")
    with Store.open(run, catch_up=False) as store:
        assert kinds_of(store) == {"BASE TABLE", "VIEW"}
        assert store.rows("SELECT count(*) FROM events WHERE length(kind) = 1000000") == [(50,)]
        assert store.rows(settings) == before


def test_few_rows_are_queried_on_one_thread_with_the_passes_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    setting = "SELECT value FROM duckdb_settings() WHERE name = 'disabled_optimizers'"
    joined = "SELECT count(*) FROM steps a, steps b WHERE a.rank = b.rank AND a.step = b.step AND a.step > 3"
    with Store.open(run) as store:
        ((left_out,),) = store.rows(setting)
        assert {"join_order", "statistics_propagation"} <= set(left_out.split(","))
        assert not {"filter_pushdown", "unused_columns", "deliminator"} & set(left_out.split(","))
        assert store.rows("SELECT current_setting('threads')") == [(1,)]
        (few,) = store.rows(joined)
        assert not compares_all_pairs(store, joined)
    monkeypatch.setattr(views, "_FEW_ROWS", 3)
    with Store.open(run) as store:
        assert store.rows(setting) == [("",)]
        assert store.rows(joined) == [few]


def test_more_rows_are_copied_for_many_queries_and_joined_in_a_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    joined = "SELECT count(*) FROM steps a, collectives b, spans c WHERE a.start_ns = c.start_ns AND b.step = c.step"
    monkeypatch.setattr(views, "_FEW_ROWS", 60)
    with Store.open(run) as store:
        assert kinds_of(store) == {"BASE TABLE"}
        assert not compares_all_pairs(store, joined)
        (found,) = store.rows(joined)
    monkeypatch.setattr(views, "_FEW_ROWS", 10_000)
    with Store.open(run) as store:
        assert compares_all_pairs(store, joined)
        assert store.rows(joined) == [found]
