"""A store made anew from the tapes.

result = rebuild(run, progress=lambda done, total: ...)
result.rows["steps"]
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from probes.tape.rundir import RunDir
from probes.tape.segment_index import INDEX_NAME, retired_segments
from store.database import StoreError, WriterLock, connect_attached, log_of, quarantine, translated
from store.ddl import quoted
from store.ingest.carry_over import carry_over
from store.ingest.ingest import Ingester
from store.ingest.rank_folders import folders_by_node

__all__ = ["RebuildResult", "rebuild"]

WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildResult:
    """Counts of what was ingested into the new stores."""

    rows: dict[str, int]
    """Finished rows by table, over all nodes."""
    problems: tuple[str, ...]
    """Files that could not be read, or not wholly; table `ingest_problems` says why."""
    kept: tuple[Path, ...] = ()
    """Former stores that were set aside: they have rows that the tapes no longer have, or cannot be read."""


def rebuild(run: RunDir, progress: Callable[[int, int], None] | None = None, *, force: bool = False) -> RebuildResult:
    """Make every node's store anew; `progress(bytes done, bytes of all tapes)` is called now and then.

    Where tapes are retired, the rows of the old store come first. The old store stays in use until the new one is
    whole. One that has rows which the tapes no longer have is kept as it is, unless `force`: then it is set aside.
    Raises StoreLockedError while a watch writes, StoreError if the folder cannot be written or rows would be lost.
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
                if store.exists() and retired_segments(run.node_dir(node) / INDEX_NAME):
                    with contextlib.suppress(StoreError):  # what it cannot give is named as a problem of the tapes
                        carry_over(store, fresh)
                        rows.update(_counts(fresh))
                with Ingester(run, node, threads=threads, store_path=fresh, folders=folders) as ingester:
                    lag = True
                    while lag:
                        result = ingester.tick(thorough=True)
                        rows.update(result.rows)
                        lag = result.lag
                        done += result.bytes_read
                        if progress:
                            progress(min(done, total), total)
                    problems.extend((*result.truncated, *result.damaged))
                aside = _check_loss(fresh, store, force=force)
                kept += [aside] if aside is not None else []
                _put_in_place(fresh, store)
            finally:
                fresh.unlink(missing_ok=True)
                log_of(fresh).unlink(missing_ok=True)
    return RebuildResult(rows=dict(rows), problems=tuple(problems), kept=tuple(kept))


def _check_loss(fresh: Path, store: Path, *, force: bool) -> Path | None:
    """Set the former store aside if need be; returns its place. Raises StoreError for a loss that is not forced."""
    if not store.exists():
        return None
    try:
        before = _counts(store)
    except StoreError:
        return quarantine(store)  # unreadable, as far as is known now
    after = _counts(fresh)
    lost = {table: (rows, after.get(table, 0)) for table, rows in before.items() if after.get(table, 0) < rows}
    if not lost:
        return None
    if force:
        return quarantine(store)
    text = ", ".join(f"{table} {rows:,} -> {now:,}" for table, (rows, now) in sorted(lost.items()))
    raise StoreError(
        f"{store} has rows that the tapes no longer have ({text}); it was left as it is. "
        "See `rankscope analyze` for the damaged files; --force replaces the store and keeps the former one"
    )


def _counts(path: Path) -> dict[str, int]:
    """Rows by table, open ones included. Raises StoreError."""
    import duckdb

    connection = connect_attached({"store": path}, wait_s=WAIT_S)
    try:
        listed = connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE database_name = 'store' AND table_name NOT LIKE 'ingest%'"
        ).fetchall()
        counts: Counter[str] = Counter()
        for (name,) in listed:
            ((number,),) = connection.execute(f"SELECT count(*) FROM store.main.{quoted(name)}").fetchall()
            counts[str(name).removesuffix("_done").removesuffix("_open")] += number
        return dict(counts)
    except duckdb.Error as error:
        raise translated(error, path) from error
    finally:
        connection.close()


def _put_in_place(fresh: Path, store: Path) -> None:
    """The old write-ahead log goes first: beside the new file it would be replayed into it."""
    log_of(store).unlink(missing_ok=True)
    fresh.replace(store)
