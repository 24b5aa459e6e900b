"""Run a statement that somebody typed in a process of its own, with limits that hold whatever DuckDB does.

    answer = ask(run, "SELECT rank, median(duration_ns) FROM steps GROUP BY rank", max_rows=1000, limit_s=20)
    answer.names, answer.rows, answer.is_cut

The kernel bounds its memory (RLIMIT_AS) and its time: some operators allocate beyond DuckDB's own accounting, and some
do not stop when they are interrupted. A process that is over a limit is ended, and the caller gets a StoreError. One
process is kept for the next question, so a simple one costs no start.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pickle
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probes.attach.own_process import own_process
from probes.tape.rundir import RunDir
from store.catch_up import stores_up_to_date
from store.database import StoreError
from store.sql.console import ConsoleAnswer

__all__ = ["ask", "warm_up"]

MAX_AT_ONCE = 3
"""Statements that are run at the same time; one more is refused."""
START_S = 60.0
MARGIN_S = 2.0
"""After the limit: to open the files, and for the answer to arrive."""
WAIT_S = 5.0
"""For a writer that has a file open."""
CATCH_UP_WAIT_S = 10.0
MEMORY_BYTES = 1 << 30
MAX_ANSWER_BYTES = 65 << 20
_VALUES = frozenset({
    ("datetime", "date"), ("datetime", "datetime"), ("datetime", "time"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("decimal", "Decimal"), ("uuid", "UUID"), ("uuid", "SafeUUID"), ("builtins", "bytearray"),
})  # fmt: skip


class _Child:
    """One process; answers one question at a time."""

    def __init__(self) -> None:
        command, environment = own_process("store.sql.child")
        # Each arena of malloc reserves address space, which the limit would count.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._is_ready = False

    def ask(self, question: dict[str, Any]) -> Any:
        """The answer, or a StoreError. The process is of no use after an EOFError or a TimeoutError."""
        if not self._is_ready:
            self._read(time.monotonic() + START_S)
            self._is_ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()
        return _loads(self._read(time.monotonic() + question["limit_s"] + WAIT_S + MARGIN_S))

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a question that was never read
                    stream.close()

    def _read(self, deadline_s: float) -> bytes:
        (size,) = struct.unpack(">Q", self._exactly(8, deadline_s))
        if size > MAX_ANSWER_BYTES:
            raise EOFError
        return self._exactly(size, deadline_s)

    def _exactly(self, num_bytes: int, deadline_s: float) -> bytes:
        assert self.process.stdout is not None
        found, fd = bytearray(), self.process.stdout.fileno()
        while len(found) < num_bytes:
            if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError
            if not (part := os.read(fd, min(1 << 20, num_bytes - len(found)))):
                raise EOFError
            found += part
        return bytes(found)


class _Pool:
    """At most one idle process, and MAX_AT_ONCE that work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: _Child | None = None
        self._working: set[_Child] = set()
        self._owner_pid = os.getpid()

    def warm_up(self) -> None:
        """Start a process for the next question, unless one waits."""
        with self._lock:
            self._forget_after_fork()
            if self._idle is None:
                self._idle = _Child()

    def take(self) -> _Child:
        """A process that the caller gives back or ends. Raises StoreError."""
        with self._lock:
            self._forget_after_fork()
            if len(self._working) >= MAX_AT_ONCE:
                raise StoreError(f"{MAX_AT_ONCE} statements are being run already: try again when one has ended")
            child, self._idle = self._idle, None
            if child is None or child.process.poll() is not None:
                child = _Child()
            self._working.add(child)
            return child

    def give_back(self, child: _Child) -> None:
        """Keep a process that has answered, or end it where one waits already."""
        with self._lock:
            if self._idle is None:
                self._idle = child
                self._working.discard(child)
                return
        self.end(child)

    def end(self, child: _Child) -> None:
        """End a process that was taken."""
        child.kill()
        with self._lock:
            self._working.discard(child)

    def close(self) -> None:
        """End the process that waits."""
        with self._lock:
            self._forget_after_fork()
            child, self._idle = self._idle, None
        if child is not None:
            child.kill()

    def _forget_after_fork(self) -> None:
        if self._owner_pid != os.getpid():  # a fork must not talk to its parent's process
            self._idle, self._working, self._owner_pid = None, set(), os.getpid()


_pool = _Pool()
atexit.register(_pool.close)
warm_up = _pool.warm_up


def ask(
    run: RunDir, sql: str, *, max_rows: int, limit_s: float, memory_bytes: int = MEMORY_BYTES, catch_up: bool = True
) -> ConsoleAnswer:
    """The answer to one reading statement over a run's records. Raises StoreError.

    `memory_bytes`: what it may allocate beyond what an empty connection takes. `catch_up`: as in `Store.open`, in this
    process and not counted.
    """
    with contextlib.ExitStack() as scratch:
        files = stores_up_to_date(run, scratch, CATCH_UP_WAIT_S) if catch_up else run.stores()
        if not files:
            raise StoreError(f"{run.path} has no store yet: neither a watch nor a reader made one from its tapes")
        return _ask(files, sql, max_rows, limit_s, memory_bytes)


def _ask(files: Sequence[Path], sql: str, max_rows: int, limit_s: float, memory_bytes: int) -> ConsoleAnswer:
    question = {
        "paths": [str(path) for path in files], "sql": sql, "max_rows": max_rows, "limit_s": limit_s,
        "memory_bytes": memory_bytes, "wait_s": WAIT_S,
    }  # fmt: skip
    child = _pool.take()
    began = time.monotonic()
    try:
        found = child.ask(question)
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
    return f"it needed more than {memory_bytes / 2**30:.3g} GiB of memory and was ended: query fewer steps or ranks"


class _Values(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _VALUES:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


def _loads(blob: bytes) -> dict[str, Any]:
    try:
        found = _Values(io.BytesIO(blob)).load()
    except pickle.UnpicklingError as error:
        raise StoreError(f"the answer cannot be read: it {error}") from None
    assert isinstance(found, dict)
    return found
