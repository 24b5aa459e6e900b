"""Open the store's files: the writer lock, busy and damaged files, and limits on what SQL may access.

    with WriterLock(path, role="watch"):
        connection = connect_writer(path, wait_s=1.0, threads=1)

There are two locks. DuckDB's lock on the file is held only while a process has the file open (a tick, a query); others
wait until it is free. The writer lock (`<store>.lock`, an flock that ends with its process) reserves writing for one
process; `watch` holds it as long as it runs. DuckDB is imported on first use, so that `import store` is quick.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from probes.tape.files.safe_open import file_problem

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "MIRROR",
    "NO_EXTENSIONS",
    "STORAGE_VERSION",
    "WAIT_S",
    "Closing",
    "StoreBusyError",
    "StoreCorruptError",
    "StoreError",
    "StoreForeignError",
    "StoreLockedError",
    "StoreOutdatedError",
    "WriterLock",
    "as_store_error",
    "connect_attached",
    "connect_for_file",
    "connect_memory",
    "connect_writer",
    "ingested_until_ns",
    "interruptible",
    "is_watched",
    "log_of",
    "quarantine",
    "require_regular_file",
    "retry_until_free",
]


class StoreError(ValueError):
    """The store cannot be used; the message is one line with the reason and what to do.

    StoreError
    ├── StoreLockedError    another process is the store's writer
    ├── StoreBusyError      another process kept the file open for longer than the time limit
    └── StoreCorruptError   the file is not a readable DuckDB database
        ├── StoreOutdatedError   it is intact, but was written by another version of Rankscope
        └── StoreForeignError    it is intact, but has the records of another run
    """


class StoreLockedError(StoreError):
    """Another process is the store's writer; `role` and `pid` identify it."""

    def __init__(self, path: Path, holder: Mapping[str, Any]) -> None:
        self.role = str(holder.get("role", "unknown"))
        self.pid = holder.get("pid")
        advice = "wait until the run ends" if self.role == "watch" else "stop it"
        super().__init__(
            f"{path} already has a writer: {self.role}, process {self.pid}; {advice}, or open the store read-only"
        )


class StoreBusyError(StoreError):
    """Another process kept the file open for longer than the time limit."""


class StoreCorruptError(StoreError):
    """The file is not a readable DuckDB database."""


class StoreOutdatedError(StoreCorruptError):
    """The file is intact, but has the tables of another version of Rankscope."""


class StoreForeignError(StoreCorruptError):
    """The file is intact, but has the records of another run."""


POLL_S = 0.005
MAX_POLL_S = 0.05
"""Maximum pause between attempts to open a file in use. Pauses grow up to this, since an attempt takes 4 ms of CPU
time.
"""
WAIT_S = 10.0
"""Seconds that a reader or writer waits for a store that another process has open."""
ROLE_WAIT_S = 0.5
"""Seconds to wait for the holder of a writer lock that has not written its role yet."""
READER = "reader"
"""Role of a reader that brings the store up to date before it reads; it holds the lock only briefly."""
MIRROR = "mirror"
"""Role of a process that mirrors a run from a folder or bucket. Records of the run may still arrive."""
NO_EXTENSIONS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
}
_CLOSED = NO_EXTENSIONS | {"enable_external_access": "false", "lock_configuration": "true"}
_MIN_BYTES = 3 * 4096  # a DuckDB file begins with three headers
_NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")
_DAMAGED = (
    "Corrupt database", "not a valid DuckDB", "Could not read enough bytes", "Failed to load metadata",
    # the writer was killed between a checkpoint and the removal of the write-ahead log that it had applied
    "This WAL ", "WAL does not match",
)  # fmt: skip
_INTERRUPTED = "Query interrupted"
_IN_PYTHON = "KeyboardInterrupt"
"""Start of the last line of DuckDB's error if a signal arrived while DuckDB was reading columns in Python."""
_USELESS_LOG = re.compile(r"File checkpoint iteration: (\d+), WAL checkpoint iteration: (\d+)")
STORAGE_VERSION = "v1.4.0"  # the oldest DuckDB version that must be able to open the file


class Closing:
    """Context manager that calls `close` on exit."""

    def close(self) -> None:
        """Release the resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class WriterLock(Closing):
    """Exclusive right to write a store, held until `close` or the end of the process.

    Waits at most `wait_s` seconds for a holder that only brings the store up to date (role `reader`). Raises
    StoreLockedError.
    """

    def __init__(self, store: Path, *, role: str, wait_s: float = 30.0) -> None:
        path = _lock_of(store)
        if problem := file_problem(path):  # through a link, the lock would be written into another file
            raise StoreError(f"cannot write {path}: it {problem}; remove it")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from None
        deadline = time.monotonic() + wait_s
        while not _locked(self._fd):
            holder = _holder(self._fd)
            if holder.get("role", READER) != READER or time.monotonic() >= deadline:
                os.close(self._fd)
                raise StoreLockedError(store, holder)
            time.sleep(POLL_S)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "role": role}).encode(), 0)
        except OSError as error:  # the disk is full
            os.close(self._fd)
            raise StoreError(f"cannot write {path}: {error.strerror}") from None

    def mark_ingested(self, wall_ns: int) -> None:
        """Set the lock file's modification time to `wall_ns` (epoch nanoseconds), up to which the store holds all
        records.
        """
        os.utime(self._fd, ns=(wall_ns, wall_ns))

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_watched(stores: Iterable[Path]) -> bool:
    """Return True if a live `watch`, or the mirror of a run in a folder or bucket, writes one of these stores. Then
    records may still arrive after the run's end.
    """
    return any(True for _ in _watched(stores))


def ingested_until_ns(stores: Iterable[Path]) -> int:
    """Epoch nanoseconds up to which all these stores hold the recorded data; now if no `watch` writes them.

    `watch` may ingest only every few seconds; this delay must not be mistaken for silent ranks.
    """
    marks = [path.stat().st_mtime_ns for path in _watched(stores)]
    return min([time.time_ns(), *marks])


def _watched(stores: Iterable[Path]) -> Iterator[Path]:
    """Lock files of the stores that a live `watch` or mirror writes."""
    for store in stores:
        lock = _lock_of(store)
        if not lock.exists():
            continue
        try:
            WriterLock(store, role=READER, wait_s=ROLE_WAIT_S).close()
        except StoreLockedError as error:
            if error.role in ("watch", MIRROR):
                yield lock
        except StoreError:
            continue  # the folder is read-only, so the run is archived and has no writer


def _lock_of(store: Path) -> Path:
    return store.with_name(store.name + ".lock")


def _holder(fd: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def connect_writer(path: Path, *, wait_s: float, threads: int) -> DuckDBPyConnection:
    """Open a store for writing; create it if it does not exist. SQL stored in the file cannot access other files."""
    import duckdb

    config = NO_EXTENSIONS | {
        "enable_external_access": "false",
        "storage_compatibility_version": STORAGE_VERSION,
        "threads": threads,
        "pandas_analyze_sample": 0,  # object columns are text: do not infer their type from the first rows
    }
    require_regular_file(path)
    return retry_until_free(path, wait_s, lambda: duckdb.connect(str(path), config=config))


def connect_attached(paths: Mapping[str, Path], *, wait_s: float, threads: int | None = None) -> DuckDBPyConnection:
    """Open an in-memory database with the stores attached read-only, under their keys in `paths`. Call `lock_down` on
    it before use.
    """
    import duckdb

    limits = {} if threads is None else {"threads": threads}
    connection = duckdb.connect(":memory:", config=NO_EXTENSIONS | limits)
    try:
        attach(connection, paths, wait_s=wait_s)
    except BaseException:
        connection.close()
        raise
    return connection


def attach(connection: DuckDBPyConnection, paths: Mapping[str, Path], *, wait_s: float) -> None:
    """Attach stores read-only. A locked connection accepts only the files that were attached when it was locked."""
    for name, path in paths.items():
        require_regular_file(path)
        literal = str(path).replace("'", "''")
        retry_until_free(path, wait_s, partial(connection.execute, f"ATTACH '{literal}' AS {name} (READ_ONLY)"))


def lock_down(connection: DuckDBPyConnection, *, memory_bytes: int | None = None, spill_to: Path | None = None) -> None:
    """Restrict SQL, irrevocably, to the attached files: no network, no extension. Queries that exceed `memory_bytes`
    spill to the folder `spill_to`, or fail if it is not given.
    """
    if memory_bytes is not None:
        connection.execute(f"SET memory_limit = '{int(memory_bytes)} B'")
        folder = "" if spill_to is None else str(spill_to).replace("'", "''")
        connection.execute(f"SET temp_directory = '{folder}'")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def connect_memory(*, threads: int | None = None) -> DuckDBPyConnection:
    """Open an in-memory database for rows read from other formats; its SQL cannot access files."""
    import duckdb

    limits = {} if threads is None else {"threads": threads}
    return duckdb.connect(":memory:", config={**_CLOSED, "pandas_analyze_sample": 0, **limits})


def connect_for_file(path: Path) -> DuckDBPyConnection:
    """Open an in-memory database. SQL in it can read this one file and nothing else."""
    import duckdb

    connection = duckdb.connect(":memory:", config={**NO_EXTENSIONS, "memory_limit": "2GB"})
    quoted = str(path).replace("'", "''")
    connection.execute(f"SET allowed_paths = ['{quoted}']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def require_regular_file(path: Path) -> None:
    """Raise StoreError unless the store and its write-ahead log are regular files: DuckDB would follow a link, and
    block on a FIFO.
    """
    for file in (path, log_of(path)):
        if problem := file_problem(file):
            raise StoreCorruptError(f"{file} {problem}")


def log_of(path: Path) -> Path:
    """Path of the write-ahead log that DuckDB keeps next to a store."""
    return path.with_name(path.name + ".wal")


def retry_until_free(path: Path, wait_s: float, connect: Callable[[], DuckDBPyConnection]) -> DuckDBPyConnection:
    """Retry `connect` while another process has the file open. Raises StoreBusyError after `wait_s` seconds."""
    import duckdb

    deadline, pause_s = time.monotonic() + wait_s, POLL_S
    while True:
        try:
            return connect()
        except duckdb.Error as error:
            store_error = as_store_error(error, path)
            if not isinstance(store_error, StoreBusyError) or time.monotonic() >= deadline:
                raise store_error from error
        time.sleep(pause_s)
        pause_s = min(MAX_POLL_S, 1.3 * pause_s)


def as_store_error(error: Exception, path: Path | str) -> StoreError:
    """Convert an error from DuckDB to a StoreError."""
    import duckdb

    text = str(error)
    line = text.strip().partition("\n")[0][:300]
    if any(mark in text for mark in ("Could not set lock", "Unique file handle conflict", "different configuration")):
        return StoreBusyError(f"{path} is in use: {line}")
    if any(mark in text for mark in _NO_ROOM):
        return StoreError(f"{path} cannot be written: {line}; free some space: nothing is lost")
    damaged = isinstance(error, (duckdb.InternalException, duckdb.SerializationException))
    if damaged or any(mark in text for mark in _DAMAGED):
        return StoreCorruptError(f"{path} is damaged: {line}; `rankscope rebuild` rebuilds it from the tapes")
    return StoreError(f"{path}: {line}")


def drop_useless_log(path: Path, error: StoreError) -> bool:
    """Remove a store's write-ahead log if `error` says that a checkpoint has already applied it. DuckDB refuses to open
    such a pair, which a writer leaves if it is killed between a checkpoint and the removal of the log. Only the holder
    of the writer lock may call this.
    """
    found = _USELESS_LOG.search(str(error.__cause__))
    if found is None or int(found[1]) != int(found[2]) + 1:
        return False
    log_of(path).unlink(missing_ok=True)
    return True


def quarantine(path: Path) -> Path | None:
    """Move an unusable store and its write-ahead log aside; returns the new path. A file that is too short to hold rows
    is deleted instead, because a full disk may leave many of these. A log without a store is deleted, too.
    """
    log = log_of(path)
    is_empty = path.is_symlink() or not path.exists() or (not path.is_dir() and path.stat().st_size < _MIN_BYTES)
    if is_empty and (log.is_symlink() or not log.is_dir()):
        log.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return None
    aside = path.with_name(path.name + ".quarantine")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.quarantine-{number}")
    if log.exists() or log.is_symlink():
        log.replace(aside.with_name(aside.name + ".wal"))
    if path.exists():
        path.replace(aside)
    return aside


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt if a signal (Ctrl-C, or SIGTERM with a handler) ended a query in the block. DuckDB
    replaces the handler's exception with another error. Code that tolerates failing analyses would swallow that error.
    """
    try:
        yield
    except Exception as error:  # RuntimeError or duckdb.Error
        text = str(error)
        if text == _INTERRUPTED or text.rstrip().rpartition("\n")[2].startswith(_IN_PYTHON):
            raise KeyboardInterrupt from error
        raise
