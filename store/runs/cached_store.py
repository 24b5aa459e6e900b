"""Keep the database of a run's stores between the rounds of `watch`, which opens the stores in each round.

    with CachedStore(run) as kept:
        with kept.opened() as store: ...           # the files are attached only in this block

Opening a store spends most of its CPU time on creating an in-memory database with a view for each table. This database
is kept, and only the files are attached in each round, so that writers can use them in between. A full open is needed
each time for files with few rows (these are copied), for files of another version of Rankscope, and for runs in which
norms are computed from parts (`store.derived.global_norms`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from probes.tape.rundir import RunDir
from store.database import WAIT_S, Closing, StoreError, attach, connect_attached, lock_down
from store.reader import Store
from store.views import has_global_norms, make_views, show_files

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["CachedStore"]


class CachedStore(Closing):
    """An instance must not be used by several threads."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._connection: DuckDBPyConnection | None = None
        self._paths: tuple[Path, ...] = ()

    @contextlib.contextmanager
    def opened(self, *, node: int | None = None) -> Iterator[Store]:
        """Attach the stores of all nodes, or of one, without catching up. Raises StoreError."""
        paths = tuple(path for path in self._run.stores() if node is None or path == self._run.store(node))
        if not paths:
            raise StoreError(f"{self._run.path} has no store yet")
        try:
            store, lasts = self._store(paths)
            yield store
        except BaseException:
            self.close()
            raise
        if not lasts:
            self.close()
            return
        assert self._connection is not None
        for name in _named(paths):
            self._connection.execute(f"DETACH {name}")

    def close(self) -> None:
        """Free the memory."""
        connection, self._connection, self._paths = self._connection, None, ()
        if connection is not None:
            connection.close()

    def _store(self, paths: tuple[Path, ...]) -> tuple[Store, bool]:
        """Return the store, and True if its views remain valid for the next round."""
        if self._connection is not None and self._paths == paths:
            attach(self._connection, _named(paths), wait_s=WAIT_S)
            if not has_global_norms(self._connection):
                return Store(self._connection, str(self._run.path), is_whole=True), True
        self.close()
        self._connection, self._paths = connect_attached(_named(paths), wait_s=WAIT_S, threads=1), paths
        stand_ins = make_views(self._connection, paths)
        lasts = show_files(self._connection, paths)
        lock_down(self._connection)
        return Store(self._connection, str(self._run.path), stand_ins=stand_ins, is_whole=True), lasts


def _named(paths: tuple[Path, ...]) -> dict[str, Path]:
    return {f"n{i}": path for i, path in enumerate(paths)}
