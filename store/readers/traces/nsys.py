"""Read a report of Nsight Systems, exported to SQLite (`nsys export -t sqlite`), as the trace of one rank.

    trace = read_nsys(Path("rank3.sqlite"), is_only=False)
    trace.compute, trace.communication      # as for a Kineto trace, microseconds

Kernels and copies come from the documented tables of the export (`CUPTI_ACTIVITY_KIND_KERNEL`, `..._MEMCPY`,
`..._MEMSET`, `StringIds`). Steps are NVTX ranges named `ProfilerStep#3`, `step 3` or `iteration 3`; without them the
whole report is one step.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from probes.tape.files.safe_open import file_problem
from store.arrays import Floats
from store.readers.traces.intervals import NONE, Spans, union
from store.readers.traces.kineto import MAX_STEPS, RankTrace
from store.readers.traces.trace_devices import is_communication
from store.readers.untrusted.external_files import NO_RANK, SourceError, head, rank_of_name

__all__ = ["SQLITE", "is_nsys", "read_nsys"]

SQLITE = b"SQLite format 3\0"
"""First bytes of a SQLite file."""
MAX_ROWS = 12_000_000
PIECE_ROWS = 200_000
MAX_VALUE_BYTES = 1 << 20
"""Maximum bytes of a row, a text, or a table's CREATE statement."""
MAX_TABLES = 5_000
MAX_NAME_CHARS = 200
HEAP_BYTES = 128 << 20
"""Maximum bytes that SQLite may allocate."""
LIMIT_S = 45.0
_STEP = re.compile(r"(?:ProfilerStep#|(?:step|iteration|iter)[ _:=#]*)(\d{1,9})$", re.IGNORECASE)
_TABLES = frozenset({
    "StringIds", "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
})  # fmt: skip
_COPY_TABLES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")


def is_nsys(path: Path) -> bool:
    """Return True for a SQLite file. Raises SourceError if it cannot be opened."""
    return head(path, len(SQLITE)) == SQLITE


def read_nsys(path: Path, *, is_only: bool = False) -> RankTrace:
    """Read one report. Raises SourceError if nothing in it is usable."""
    if problem := file_problem(path):
        raise SourceError(problem)
    named = "rank" in path.name.lower()
    rank = rank_of_name(path) if named or not is_only else 0
    if rank is None and is_only:
        rank = 0
    if rank is None:
        raise SourceError(f"{NO_RANK}: put it into its name (rank3.sqlite)")
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            _limit(connection)
            return _read(connection, path, rank)
        finally:
            connection.close()
    except sqlite3.Error as error:
        if "interrupted" in str(error):
            raise SourceError(f"took longer than {LIMIT_S:.0f} s to read and was given up") from None
        raise SourceError(f"cannot be read as a report of Nsight Systems: {str(error)[:100]}") from None


def _limit(connection: sqlite3.Connection) -> None:
    """Limit what the file can make SQLite do: huge values, endless expressions, a schema that runs code."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 100)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 20)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
    ends_s = time.monotonic() + LIMIT_S
    connection.set_progress_handler(lambda: time.monotonic() > ends_s, 100_000)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")


def _tables(connection: sqlite3.Connection) -> set[str]:
    """Names of the known tables in the file. Raises SourceError for a table with computed values."""
    sizes = connection.execute("SELECT count(*), coalesce(max(length(name)), 0) FROM sqlite_master").fetchone()
    if sizes[0] > MAX_TABLES or sizes[1] > MAX_NAME_CHARS:
        raise SourceError(f"holds {sizes[0]:,} tables, or names of {sizes[1]:,} characters: no report does")
    found = set()
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
        if name not in _TABLES:
            continue
        hidden = connection.execute("SELECT count(*) FROM pragma_table_xinfo(?) WHERE hidden", (name,)).fetchone()
        if hidden[0] or not str(sql).upper().startswith("CREATE TABLE"):
            raise SourceError(f"computes the values of table {name}: no report does")
        found.add(str(name))
    return found


def _read(connection: sqlite3.Connection, path: Path, rank: int) -> RankTrace:
    tables = _tables(connection)
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables or "StringIds" not in tables:
        raise SourceError("is an sqlite file without kernels of Nsight Systems (nsys profile -t cuda,nvtx)")
    names = {
        number for number, text in connection.execute("SELECT id, substr(value, 1, 200) FROM StringIds LIMIT 2000000")
        if isinstance(text, str) and is_communication(text)
    }  # fmt: skip
    rows = connection.execute(f"SELECT start, end, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT {MAX_ROWS}")
    compute, communication = _kernels(rows, names)
    copied = [
        _copies(connection.execute(f"SELECT start, end FROM {table} LIMIT {MAX_ROWS}"))
        for table in _COPY_TABLES
        if table in tables
    ]
    copies = union(*(np.concatenate([np.zeros(0), *ends]) for ends in zip(*copied, strict=True))) if copied else NONE
    steps = _steps(connection) if "NVTX_EVENTS" in tables else {}
    if not len(compute[0]) and not len(communication[0]):
        raise SourceError("holds no kernels")
    begin, end = _windows(steps, compute, communication, copies)
    return RankTrace(
        rank=rank, path=path, world_size=None, stage=0, device="cuda", marked=bool(steps),
        steps=np.array(sorted(steps) or [0], dtype=np.int64), begin_us=begin, end_us=end, compute=compute,
        communication=communication, copies=copies, data=NONE,
        num_events=len(compute[0]) + len(communication[0]), damaged_events=0,
    )  # fmt: skip


def _kernels(rows: sqlite3.Cursor, names: set[int]) -> tuple[Spans, Spans]:
    compute, communication = [_no_times()], [_no_times()]
    while piece := rows.fetchmany(PIECE_ROWS):
        compute.append(_times((a, b) for a, b, name in piece if name not in names))
        communication.append(_times((a, b) for a, b, name in piece if name in names))
    return _spans(compute), _spans(communication)


def _copies(rows: sqlite3.Cursor) -> Spans:
    found = [_no_times()]
    while piece := rows.fetchmany(PIECE_ROWS):
        found.append(_times(piece))
    return _spans(found)


def _no_times() -> Floats:
    return np.zeros((0, 2))


def _times(pairs: Iterable[tuple[Any, Any]]) -> Floats:
    """Convert (start, end) pairs from nanoseconds to microseconds, shape (n, 2). Invalid pairs are left out."""
    kept = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and 0 <= a <= b < 2**62]
    return np.array(kept, dtype=np.float64).reshape(-1, 2) / 1e3


def _spans(pieces: Sequence[Floats]) -> Spans:
    values = np.concatenate(pieces)
    return union(values[:, 0], values[:, 1])


def _steps(connection: sqlite3.Connection) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    rows = connection.execute(
        "SELECT n.start, n.end, substr(coalesce(n.text, s.value), 1, 200) "
        "FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId "
        f"WHERE n.end IS NOT NULL LIMIT {MAX_ROWS}"
    )
    for start, end, text in rows:
        match = _STEP.search(text) if isinstance(text, str) else None
        if match and isinstance(start, int) and isinstance(end, int) and len(found) < MAX_STEPS:
            found.setdefault(int(match[1]), (start / 1e3, end / 1e3))
    return found


def _windows(steps: dict[int, tuple[float, float]], *spans: Spans) -> tuple[Floats, Floats]:
    if steps:
        marks = np.array([steps[number] for number in sorted(steps)])
        return marks[:, 0].copy(), marks[:, 1].copy()
    first = min(float(begin[0]) for begin, _ in spans if len(begin))
    last = max(float(end[-1]) for _, end in spans if len(end))
    return np.array([first]), np.array([last])
