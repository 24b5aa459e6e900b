"""A report of Nsight Systems, exported as sqlite (`nsys export -t sqlite`), as the trace of one rank.

    trace = read_nsys(Path("rank3.sqlite"), is_only=False)
    trace.compute, trace.communication      # as of a Kineto trace, microseconds

Kernels and copies are of the tables that the export documents (`CUPTI_ACTIVITY_KIND_KERNEL`, `..._MEMCPY`,
`..._MEMSET`, `StringIds`). Steps are ranges of NVTX named `ProfilerStep#3`, `step 3` or `iteration 3`; without them the
whole report is one step.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from probes.tape.safe_open import file_problem
from store.arrays import Floats
from store.readers.external_files import SourceError, head, rank_of_name
from store.readers.intervals import Spans, union
from store.readers.kineto import COMMUNICATION_KERNEL, MAX_STEPS, RankTrace

__all__ = ["SQLITE", "is_nsys", "read_nsys"]

SQLITE = b"SQLite format 3\0"
"""The first bytes of the file."""
MAX_ROWS = 12_000_000
_STEP = re.compile(r"(?:ProfilerStep#|(?:step|iteration|iter)[ _:=#]*)(\d{1,9})$", re.IGNORECASE)
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")


def is_nsys(path: Path) -> bool:
    """Return True for an sqlite file. Raises SourceError where it cannot be opened."""
    return head(path, len(SQLITE)) == SQLITE


def read_nsys(path: Path, *, is_only: bool = False) -> RankTrace:
    """Read one report. Raises SourceError where nothing of it can be used."""
    if problem := file_problem(path):
        raise SourceError(problem)
    named = "rank" in path.name.lower()
    rank = rank_of_name(path) if named or not is_only else 0
    if rank is None:
        raise SourceError("has no rank in its name (rank3.sqlite)")
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        try:
            return _read(connection, path, rank)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise SourceError(f"cannot be read as a report of Nsight Systems: {str(error)[:100]}") from None


def _read(connection: sqlite3.Connection, path: Path, rank: int) -> RankTrace:
    tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables or "StringIds" not in tables:
        raise SourceError("is an sqlite file without kernels of Nsight Systems (nsys profile -t cuda,nvtx)")
    names = {
        number for number, text in connection.execute("SELECT id, value FROM StringIds LIMIT 2000000")
        if isinstance(text, str) and COMMUNICATION_KERNEL.search(text[:200])
    }  # fmt: skip
    rows = connection.execute(f"SELECT start, end, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT {MAX_ROWS}")
    compute, communication = _kernels(rows, names)
    for table in _COPIES:
        if table in tables:
            copies = _spans(connection.execute(f"SELECT start, end FROM {table} LIMIT {MAX_ROWS}").fetchall())
            compute = union(np.concatenate([compute[0], copies[0]]), np.concatenate([compute[1], copies[1]]))
    steps = _steps(connection) if "NVTX_EVENTS" in tables else {}
    if not len(compute[0]) and not len(communication[0]):
        raise SourceError("holds no kernels")
    begin, end = _windows(steps, compute, communication)
    return RankTrace(
        rank=rank, path=path, world_size=None, stage=0, device="cuda", marked=bool(steps),
        steps=np.array(sorted(steps) or [0], dtype=np.int64), begin_us=begin, end_us=end, compute=compute,
        communication=communication, data=(np.zeros(0), np.zeros(0)),
        num_events=len(compute[0]) + len(communication[0]), damaged_events=0,
    )  # fmt: skip


def _kernels(rows: sqlite3.Cursor, names: set[int]) -> tuple[Spans, Spans]:
    compute: list[tuple[Any, Any]] = []
    communication: list[tuple[Any, Any]] = []
    for start, end, name in rows:
        (communication if name in names else compute).append((start, end))
    return _spans(compute), _spans(communication)


def _spans(pairs: list[tuple[Any, Any]]) -> Spans:
    """Nanoseconds as disjoint spans in microseconds; what is no number is left out."""
    kept = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and 0 <= a <= b < 2**62]
    values = np.array(kept, dtype=np.float64).reshape(-1, 2) / 1e3
    return union(values[:, 0], values[:, 1])


def _steps(connection: sqlite3.Connection) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    rows = connection.execute(
        "SELECT n.start, n.end, coalesce(n.text, s.value) FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId "
        f"WHERE n.end IS NOT NULL LIMIT {MAX_ROWS}"
    )
    for start, end, text in rows:
        match = _STEP.search(text[:200]) if isinstance(text, str) else None
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
