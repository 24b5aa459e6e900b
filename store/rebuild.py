"""A store made anew from the tapes.

result = rebuild(run, progress=lambda done, total: ...)
result.rows["steps"]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from probes.tape.rundir import RunDir
from store.database import WriterLock, log_of
from store.ingest.ingest import Ingester
from store.ingest.rank_folders import folders_by_node

__all__ = ["RebuildResult", "rebuild"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildResult:
    """Counts of what was ingested into the new stores."""

    rows: dict[str, int]
    """Finished rows by table, over all nodes."""
    problems: tuple[str, ...]
    """Files that could not be read, or not wholly; table `ingest_problems` says why."""


def rebuild(run: RunDir, progress: Callable[[int, int], None] | None = None) -> RebuildResult:
    """Make every node's store anew; `progress(bytes done, bytes of all tapes)` is called now and then.

    The old store stays in use until the new one is whole. Rows whose tapes were removed are not in it. Raises
    StoreLockedError while a watch writes, StoreError if the folder cannot be written.
    """
    rows: Counter[str] = Counter()
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
                _put_in_place(fresh, store)
            finally:
                fresh.unlink(missing_ok=True)
                log_of(fresh).unlink(missing_ok=True)
    return RebuildResult(rows=dict(rows), problems=tuple(problems))


def _put_in_place(fresh: Path, store: Path) -> None:
    """The old write-ahead log goes first: beside the new file it would be replayed into it."""
    log_of(store).unlink(missing_ok=True)
    fresh.replace(store)
