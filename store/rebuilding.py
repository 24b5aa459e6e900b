"""Rebuild a store from the tapes.

result = rebuild(run, progress=lambda done, total: ...)
result.rows["steps"]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.tape.rundir import RunDir
from probes.tape.segment_index import INDEX_NAME, retired_segments
from store.database import (
    WAIT_S,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    WriterLock,
    as_store_error,
    connect_attached,
    drop_useless_log,
    log_of,
    quarantine,
)
from store.ddl import SEGMENT, quoted
from store.ingest.carry_over import carry_over
from store.ingest.ingest import Ingester
from store.ingest.rank_folders import folders_by_node

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["RebuildResult", "rebuild"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildResult:
    """What was ingested into the new stores."""

    rows: dict[str, int]
    """Finished rows by table, over all nodes."""
    problems: tuple[str, ...]
    """Files that could not be read completely; the reasons are in table `ingest_problems`."""
    kept: tuple[Path, ...] = ()
    """Former stores that were set aside: they cannot be read, or have rows that damaged tapes no longer have."""


def rebuild(run: RunDir, progress: Callable[[int, int], None] | None = None, *, force: bool = False) -> RebuildResult:
    """Rebuild every node's store; `progress(bytes done, bytes of all tapes)` is called at intervals.

    If tapes are retired, the old store's rows are copied first. The old store stays in use until the new one is
    complete. If it has rows that the tapes no longer have, it is kept unchanged, or set aside with `force`. It is also
    set aside if damaged tapes now give other rows. Raises StoreLockedError while a watch writes, StoreBusyError while
    another process has the store open, and StoreError if the folder cannot be written or if rows would be lost.
    """
    rows: Counter[str] = Counter()
    kept: list[Path] = []
    problems: list[str] = []
    total = sum(
        tape.stat().st_size for _, _, folder in run.rank_dirs() for tape in folder.glob("*.tape") if tape.is_file()
    )
    done = 0
    for node, folders in folders_by_node(run).items():
        store = run.store(node)
        with WriterLock(store, role="rebuild"):
            for left_over in store.parent.glob(f".{store.name}.rebuild-*"):
                left_over.unlink()
            fresh = store.with_name(f".{store.name}.rebuild-{os.getpid()}")
            try:
                threads = max(1, min(4, os.cpu_count() or 1))
                if store.exists():
                    _check_not_in_use(store)
                    if retired_segments(run.node_dir(node) / INDEX_NAME):
                        rows.update(_carried_over(store, fresh))
                with Ingester(run, node, threads=threads, store_path=fresh, folders=folders) as ingester:
                    lag = True
                    while lag:
                        result = ingester.tick(thorough=True)
                        rows.update(result.rows)
                        lag = result.lag
                        done += result.bytes_read
                        if progress:
                            progress(min(done, total), total)
                    found = (*result.truncated, *result.damaged)
                problems.extend(found)
                aside = _check_loss(fresh, store, has_problems=bool(found), force=force)
                kept += [aside] if aside is not None else []
                _put_in_place(fresh, store)
            finally:
                fresh.unlink(missing_ok=True)
                log_of(fresh).unlink(missing_ok=True)
    return RebuildResult(rows=dict(rows), problems=tuple(problems), kept=tuple(kept))


def _check_not_in_use(store: Path) -> None:
    """Raise StoreError if the store is in use, before any tape is read. Recovers a store if its writer died during a
    checkpoint of the database.
    """
    try:
        connect_attached({"former": store}, wait_s=WAIT_S).close()
    except StoreCorruptError as error:
        drop_useless_log(store, error)
    except StoreError as error:
        raise _unreadable_former(error) from error


def _carried_over(store: Path, fresh: Path) -> dict[str, int]:
    """Copy the old store's rows into the new one; returns their number by table. Raises StoreError."""
    try:
        return carry_over(store, fresh)
    except StoreCorruptError:
        return {}  # the former store is damaged, and lost rows are reported as problems of the ranks' files
    except StoreError as error:
        raise _unreadable_former(error) from error


def _check_loss(fresh: Path, store: Path, *, has_problems: bool, force: bool) -> Path | None:
    """Set the former store aside if necessary; returns its new path. Raises StoreError for a loss without `force`."""
    import duckdb

    if not store.exists():
        return None
    try:
        connection = connect_attached({"former": store, "fresh": fresh}, wait_s=WAIT_S)
        try:
            lost = _lost_rows(connection)
            differs = has_problems and _digests(connection, "former") != _digests(connection, "fresh")
        except duckdb.Error as error:
            raise as_store_error(error, store) from error
        finally:
            connection.close()
    except StoreCorruptError:
        return quarantine(store)
    except StoreError as error:
        raise _unreadable_former(error) from error
    if lost and not force:
        text = ", ".join(f"{table} {rows:,} -> {now:,}" for table, (rows, now) in sorted(lost.items()))
        raise StoreError(
            f"{store} has rows that the tapes no longer have ({text}); it was left unchanged. "
            "`rankscope analyze` lists the damaged files; --force replaces the store and keeps the former one"
        )
    return quarantine(store) if lost or differs else None


def _unreadable_former(error: StoreError) -> StoreError:
    """Error for a store that cannot be read although it is undamaged. Nobody knows which rows would be lost, so the
    store is kept even with `force`.
    """
    if isinstance(error, StoreBusyError):
        return StoreBusyError(
            f"{error}; it was left unchanged. Close the programs that have it open, then rebuild again"
        )
    return StoreError(f"{error}; it was left unchanged. To rebuild without its rows, move it away")


def _lost_rows(connection: DuckDBPyConnection) -> dict[str, tuple[int, int]]:
    """Return {table: (rows before, rows now)}, summed over the parts that have fewer rows now.

    Parts are ranks of an attempt, segments, or time ranges of events, so that new rows cannot hide lost ones.
    """
    for database in ("former", "fresh"):
        connection.execute(
            f"CREATE TEMP TABLE {database}_parts AS SELECT name, kind, part, sum(num)::BIGINT AS num "
            f"FROM ({' UNION ALL '.join(_parts(connection, database))}) GROUP BY ALL"
        )
    rows = connection.execute(
        "SELECT name, sum(was), sum(now) FROM (SELECT name, kind, f.num AS was, coalesce(n.num, 0) AS now "
        "FROM former_parts f LEFT JOIN fresh_parts n USING (name, kind, part)) "
        "WHERE now < was GROUP BY name, kind ORDER BY sum(was - now), kind DESC"
    ).fetchall()
    # Each table is divided into parts in two ways. The rows are sorted by loss, so the dict keeps the larger loss.
    return {name: (int(was), int(now)) for name, was, now in rows}


def _parts(connection: DuckDBPyConnection, database: str) -> Iterator[str]:
    """SQL queries for the number of rows by table and part, open rows included."""
    tables = _tables(connection, database)
    yield "SELECT '' AS name, '' AS kind, '' AS part, 0 AS num WHERE false"  # the writer died before it created tables
    if "pending" in tables.get("ingest_positions", ()):
        yield f"SELECT source_table, 'segment', path, next_place - len(pending) FROM {database}.main.ingest_positions"
    for table, columns in tables.items():
        if table.startswith("ingest_"):
            continue
        source = f"{database}.main.{quoted(table)}"
        name = table.removesuffix("_done").removesuffix("_open").replace("'", "''")
        keys = ", ".join(key for key in ("attempt", "rank", "wall_ns") if key in columns)
        yield f"SELECT '{name}', 'rank', [{keys}]::VARCHAR, count(*) FROM {source} GROUP BY ALL"
        if SEGMENT in columns:  # NCCL's calls in flight belong to a segment of another table
            yield (
                f"SELECT '{name}', 'segment', {SEGMENT}, count(*) FROM {source} "
                f"WHERE contains({SEGMENT}, '/{name}.') GROUP BY ALL"
            )


def _digests(connection: DuckDBPyConnection, database: str) -> dict[str, Any]:
    """Order-independent digest of the rows of each table."""
    return {
        table: connection.execute(f"SELECT count(*), sum(hash(t)) FROM {database}.main.{quoted(table)} t").fetchall()
        for table in _tables(connection, database)
        if not table.startswith("ingest_")
    }


def _tables(connection: DuckDBPyConnection, database: str) -> dict[str, list[str]]:
    """Columns by table."""
    rows = connection.execute(
        "SELECT table_name, list(column_name) FROM duckdb_columns() "
        "SEMI JOIN duckdb_tables() USING (database_name, schema_name, table_name) "
        "WHERE database_name = $1 AND schema_name = 'main' GROUP BY ALL",
        [database],
    ).fetchall()
    return dict(rows)


def _put_in_place(fresh: Path, store: Path) -> None:
    """Replace the store. The write-ahead log of the former store is removed first: DuckDB would replay it into the new
    file."""
    log_of(store).unlink(missing_ok=True)
    fresh.replace(store)
