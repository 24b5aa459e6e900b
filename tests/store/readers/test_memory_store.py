"""Stores in memory share one DuckDB of the process, and nothing else."""

from __future__ import annotations

import gc

from store.readers.memory_store import MemoryStore

DATABASES = "SELECT count(*) FROM duckdb_databases() WHERE NOT internal"


def test_each_store_sees_only_its_rows() -> None:
    with MemoryStore() as one, MemoryStore() as other:
        one.add("steps", [{"step": 3, "rank": 1}])
        assert one.rows("SELECT step, rank, attempt FROM steps") == [(3, 1, 0)]
        assert other.rows("SELECT step FROM steps") == []
        assert (one.has("steps"), other.has("steps")) == (True, False)
        other.close()
        assert one.rows("SELECT rank FROM steps") == [(1,)]


def test_a_closed_or_dropped_store_is_freed() -> None:
    with MemoryStore() as store:
        gc.collect()
        before = store.rows(DATABASES)
        closed, forgotten = MemoryStore(), MemoryStore()
        assert store.rows(DATABASES) == [(before[0][0] + 2,)]
        closed.close()
        closed.close()
        del forgotten
        gc.collect()
        assert store.rows(DATABASES) == before
