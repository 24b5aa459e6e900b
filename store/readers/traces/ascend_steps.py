"""Read step times of Ascend's profiler (`step_trace_time.csv`) as the trace of one rank.

    trace = read_ascend_steps(Path("worker3_..._ascend_pt/ASCEND_PROFILER_OUTPUT/step_trace_time.csv"))
    trace.steps, trace.compute, trace.communication      # as for a Kineto trace, microseconds

Each row is a step, with columns Device_id, Step, Computing, Communication(Not Overlapped), Overlapped, Communication,
Free. The file has durations but no times, so each step is laid out as compute, then exposed communication, then idle.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np

from store.readers.traces.intervals import NONE
from store.readers.traces.kineto import MAX_STEPS, RankTrace
from store.readers.untrusted.external_files import DOCUMENT_BYTES, NO_RANK, SourceError, head, read_whole

__all__ = ["is_ascend_steps", "read_ascend_steps"]

_HEADER = re.compile(rb"^(?:\xef\xbb\xbf)?[^\n]{0,200}\bStep,Computing,Communication\(Not Overlapped\),Overlapped,")
_NEEDED = ("Computing", "Communication(Not Overlapped)", "Overlapped", "Free")
_RANK = re.compile(r"rank[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_INFO = re.compile(r"profiler_info_(\d{1,6})\.json")


def is_ascend_steps(first: bytes) -> bool:
    """Return True if a file that starts with `first` is such a table."""
    return _HEADER.match(first) is not None


def read_ascend_steps(path: Path, *, is_only: bool = False) -> RankTrace:
    """Read one file. Raises SourceError if nothing in it is usable."""
    text = read_whole(path, DOCUMENT_BYTES)[0].decode("utf-8-sig", "replace")
    steps: list[int] = []
    parts: list[tuple[float, ...]] = []
    damaged, devices = 0, set()
    for row in csv.DictReader(io.StringIO(text)):
        try:
            numbers = tuple(float(row[name]) for name in _NEEDED)
            step = int(float(row["Step"])) if row.get("Step") else len(steps)
        except (KeyError, TypeError, ValueError, OverflowError):
            damaged += 1
            continue
        if not all(math.isfinite(number) and 0 <= number < 1e15 for number in numbers) or step in steps[-1:]:
            damaged += 1
            continue
        devices.add(row.get("Device_id"))
        steps.append(step)
        parts.append(numbers)
        if len(steps) > MAX_STEPS:
            raise SourceError(f"has more than {MAX_STEPS} steps")
    if not steps:
        raise SourceError("holds no step with all times")
    rank = _rank(path)
    if rank is None and is_only and len(devices) == 1:
        rank = 0
    if rank is None:
        raise SourceError(f"{NO_RANK} by its path (needs profiler_info_3.json next to it, or rank3 in a folder's name)")
    return _laid_out(path, rank, np.array(steps), np.array(parts), damaged)


def _laid_out(path: Path, rank: int, steps: np.ndarray, parts: np.ndarray, damaged: int) -> RankTrace:
    order = np.argsort(steps, kind="stable")
    steps, (compute, exposed, hidden, free) = steps[order], parts[order].T
    end = np.cumsum(compute + exposed + free)
    begin = end - (compute + exposed + free)
    return RankTrace(
        rank=rank, path=path, world_size=None, stage=0, device="npu", marked=True, steps=steps.astype(np.int64),
        begin_us=begin, end_us=end, compute=(begin, begin + compute),
        communication=(begin + compute - np.minimum(hidden, compute), begin + compute + exposed),
        copies=NONE, data=NONE, num_events=len(steps), damaged_events=damaged,
    )  # fmt: skip


def _rank(path: Path) -> int | None:
    """Rank in the profiler's metadata next to the file, or else in a name on its path."""
    for folder in (path.parent, path.parent.parent):
        for info in sorted(folder.glob("profiler_info*.json"))[:1]:
            if match := _INFO.fullmatch(info.name):
                return int(match[1])
            try:
                rank = json.loads(head(info, 64 << 10)).get("rank_id")
            except (ValueError, AttributeError, SourceError):
                continue
            if isinstance(rank, int) and 0 <= rank < 1_000_000:
                return rank
    names = (path.name, path.parent.name, path.parent.parent.name)
    marked = [match[1] for name in names if (match := _RANK.search(name))]
    return int(marked[0]) if marked else None
