"""Run a user's SQL statement in a separate process, with limits that do not depend on DuckDB.

    answer = ask(run, "SELECT rank, median(duration_ns) FROM steps GROUP BY rank", max_rows=1000, limit_s=20)
    answer.names, answer.rows, answer.is_cut

The kernel limits the memory (RLIMIT_AS), because some operators allocate more than DuckDB accounts for. A process that
exceeds the time limit is killed, because some operators ignore an interrupt. In both cases the caller gets a
StoreError. One idle process is kept for the next statement, which saves its start-up time.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probes.tape.rundir import RunDir
from store.catch_up import stores_up_to_date
from store.database import StoreError
from store.limited.process import LimitedProcess
from store.sql.console import ConsoleAnswer

__all__ = ["ask", "warm_up"]

MAX_AT_ONCE = 3
"""Limit on concurrent statements; further ones are refused."""
WAIT_S = 5.0
"""Seconds that a statement waits for a writer that has the store open."""
CATCH_UP_WAIT_S = 10.0
MEMORY_BYTES = 1 << 30
MAX_ANSWER_BYTES = 65 << 20
_VALUES = frozenset({
    ("datetime", "date"), ("datetime", "datetime"), ("datetime", "time"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("decimal", "Decimal"), ("uuid", "UUID"), ("uuid", "SafeUUID"), ("builtins", "bytearray"),
})  # fmt: skip


class _Child(LimitedProcess):
    """A process that runs statements."""

    def __init__(self) -> None:
        super().__init__("store.sql.child", max_answer_bytes=MAX_ANSWER_BYTES)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a statement and return its result. Raises StoreError."""
        return _loads(self.ask(json.dumps(question).encode(), question["limit_s"] + WAIT_S))


class _Pool:
    """At most one idle process and `MAX_AT_ONCE` busy ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: _Child | None = None
        self._working: set[_Child] = set()
        self._owner_pid = os.getpid()

    def warm_up(self) -> None:
        """Start a process for the next statement, unless one is idle."""
        with self._lock:
            self._forget_after_fork()
            if self._idle is None:
                self._idle = _Child()

    def take(self) -> _Child:
        """Return a process, which the caller must pass to `give_back` or `end`. Raises StoreError if all are busy."""
        with self._lock:
            self._forget_after_fork()
            if len(self._working) >= MAX_AT_ONCE:
                raise StoreError(f"{MAX_AT_ONCE} statements are already running: try again when one has ended")
            child, self._idle = self._idle, None
            if child is None or child.process.poll() is not None:
                child = _Child()
            self._working.add(child)
            return child

    def give_back(self, child: _Child) -> None:
        """Keep an idle process for the next statement, or end it if another one is already kept."""
        with self._lock:
            if self._idle is None:
                self._idle = child
                self._working.discard(child)
                return
        self.end(child)

    def end(self, child: _Child) -> None:
        """End a process returned by `take`."""
        child.kill()
        with self._lock:
            self._working.discard(child)

    def close(self) -> None:
        """End the idle process."""
        with self._lock:
            self._forget_after_fork()
            child, self._idle = self._idle, None
        if child is not None:
            child.kill()

    def _forget_after_fork(self) -> None:
        if self._owner_pid != os.getpid():  # a forked child must not use its parent's processes
            self._idle, self._working, self._owner_pid = None, set(), os.getpid()


_pool = _Pool()
atexit.register(_pool.close)
warm_up = _pool.warm_up


def ask(
    run: RunDir, sql: str, *, max_rows: int, limit_s: float, memory_bytes: int = MEMORY_BYTES, catch_up: bool = True
) -> ConsoleAnswer:
    """Run one read-only statement on a run's records and return its result. Raises StoreError.

    `memory_bytes`: limit on memory beyond what an idle connection uses. `catch_up`: as in
    `Store.open`; runs in this process, outside the limits.
    """
    with contextlib.ExitStack() as scratch:
        files = stores_up_to_date(run, scratch, CATCH_UP_WAIT_S) if catch_up else run.stores()
        if not files:
            raise StoreError(f"{run.path} has no store yet: neither a watch nor a reader has built one")
        return _ask(files, sql, max_rows, limit_s, memory_bytes)


def _ask(files: Sequence[Path], sql: str, max_rows: int, limit_s: float, memory_bytes: int) -> ConsoleAnswer:
    question = {
        "paths": [str(path) for path in files], "sql": sql, "max_rows": max_rows, "limit_s": limit_s,
        "memory_bytes": memory_bytes, "wait_s": WAIT_S,
    }  # fmt: skip
    child = _pool.take()
    began = time.monotonic()
    try:
        found = child.answer(question)
    except BaseException as error:
        _pool.end(child)
        if not isinstance(error, (EOFError, TimeoutError, OSError)):
            raise
        if time.monotonic() - began >= limit_s:
            raise StoreError(
                f"it took longer than {limit_s:g} s and was cancelled: query fewer steps or ranks"
            ) from None
        raise StoreError(_too_large(memory_bytes)) from None
    _pool.give_back(child)
    if found.get("is_out_of_memory"):
        raise StoreError(_too_large(memory_bytes))
    if "error" in found:
        raise StoreError(found["error"])
    return ConsoleAnswer(**found)


def _too_large(memory_bytes: int) -> str:
    return f"it needed more than {memory_bytes / 2**30:.3g} GiB of memory and was stopped: query fewer steps or ranks"


class _PlainValues(pickle.Unpickler):
    """Unpickler for SQL values only: the statement may have compromised the child."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _VALUES:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name)


def _loads(blob: bytes) -> dict[str, Any]:
    try:
        found = _PlainValues(io.BytesIO(blob)).load()
    except Exception as error:  # a malformed pickle raises errors of many types
        raise StoreError(f"the answer cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise StoreError(f"the answer cannot be read: it is a {type(found).__name__}")
    return found
