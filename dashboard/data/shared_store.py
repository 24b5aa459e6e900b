"""Open a run's store once for queries in quick succession, after ingesting the run's tapes.

    shared = SharedStore(run)
    with shared.session(may_grow=False) as store: ...

Opening a store costs more than most queries, in proportion to the number of nodes: 0.4 s of CPU for the 32 files of 256
ranks. So a store stays open for the queries of one page. Writers cannot open the file during that time, so the store of
a run that may grow is closed as soon as no query uses it.

If a run has no `watch`, new records are ingested first: every few seconds while the run may grow, and after its end
only if a process has written since. Many tapes without a store are ingested by a child process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from dashboard.data.processes.catch_up_process import catch_up_in_process
from probes.tape.rundir import RunDir
from store import Store, is_watched

__all__ = ["CATCH_UP_S", "SharedStore", "files_version"]

CHILD_PROCESS_BYTES = 16 << 20
"""Size in bytes from which tapes without a store are ingested by a child process."""
CATCH_UP_S = 4.0
"""Seconds between two ingests of a run without a watch."""
WAIT_S = 3.0
"""Seconds that a reader waits while another process has the store open."""
KEPT_S = 2.0
"""Seconds that the store of an ended run stays open after a query."""


def files_version(run: RunDir) -> tuple[Hashable, ...]:
    """A value that changes whenever a store of the run is written."""
    parts: list[Hashable] = []
    for path in run.stores():
        for name in (path, path.with_name(path.name + ".wal")):
            with contextlib.suppress(OSError):
                found = os.stat(name)
                parts.append((name.name, found.st_mtime_ns, found.st_size))
    return tuple(parts)


@dataclass(slots=True, eq=False)
class _Opened:
    store: Store
    version: tuple[Hashable, ...]
    num_users: int = 0
    used_at: float = 0.0


class SharedStore:
    """Shared by all threads that read a run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._caught_up_at = float("-inf")
        self._written: tuple[Hashable, ...] = ()
        self._closer: threading.Timer | None = None
        atexit.register(self._forget_unused)

    @contextlib.contextmanager
    def session(self, *, may_grow: bool) -> Iterator[Store]:
        """Yield a reader for one query. Raises StoreError."""
        with self._lock:
            opened = self._open(may_grow=may_grow)
            reader = opened.store.session()
            opened.num_users += 1
        try:
            with reader:
                yield reader
        except BaseException:
            with self._lock:
                self._forget(opened)  # opening failed, perhaps because a file is damaged or missing: try anew next time
            raise
        finally:
            with self._lock:
                opened.num_users -= 1
                opened.used_at = time.monotonic()
                if opened is not self._opened:
                    if not opened.num_users:
                        opened.store.close()
                elif may_grow:
                    self._forget(opened)
                elif self._closer is None:
                    self._close_later(KEPT_S)

    def is_due(self, *, may_grow: bool) -> bool:
        """Return True if the tapes should be ingested before the next answer."""
        if not self._run.stores():
            return True
        if time.monotonic() - self._caught_up_at < CATCH_UP_S or is_watched(self._run.stores()):
            return False
        return may_grow or not self._written or self._written != _written(self._run)

    def _open(self, *, may_grow: bool) -> _Opened:
        opened = self._opened
        if (opened is None or not opened.num_users) and self.is_due(may_grow=may_grow):
            if opened is not None:
                self._forget(opened)
            written = _written(self._run)
            if not self._run.stores() and _tape_bytes(self._run) >= CHILD_PROCESS_BYTES:
                catch_up_in_process(self._run)
            store = Store.open(self._run, catch_up=True, wait_s=WAIT_S)
            self._caught_up_at, self._written = time.monotonic(), written
        elif opened is not None and opened.version == files_version(self._run):
            return opened
        else:
            if opened is not None:
                self._forget(opened)
            store = Store.open(self._run, catch_up=False, wait_s=WAIT_S)
        self._opened = _Opened(store=store, version=files_version(self._run))
        return self._opened

    def _forget_unused(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._forget(self._opened)

    def _forget(self, opened: _Opened) -> None:
        """Give the store to no further query; close it after the current ones."""
        if opened is self._opened:
            self._opened = None
            if not opened.num_users:
                opened.store.close()

    def _close_later(self, seconds: float) -> None:
        self._closer = threading.Timer(seconds, self._close_unused)
        self._closer.daemon = True
        self._closer.start()

    def _close_unused(self) -> None:
        with self._lock:
            self._closer, opened = None, self._opened
            if opened is None:
                return
            left_s = opened.used_at + KEPT_S - time.monotonic()
            if opened.num_users or left_s > 0:
                self._close_later(max(left_s, 0.1 * KEPT_S))
            else:
                self._forget(opened)


def _written(run: RunDir) -> tuple[Hashable, ...]:
    """Value that changes when a process of the run starts, ends or writes an event."""
    parts: list[Hashable] = []
    for path in run.event_files():
        try:
            found = path.stat()
            parts.append((found.st_mtime_ns, found.st_size))
        except OSError:
            parts.append(str(path))
    return tuple(parts)


def _tape_bytes(run: RunDir) -> int:
    """Size of all tapes."""
    total = 0
    for _, _, folder in run.rank_dirs():
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            total += sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return total
