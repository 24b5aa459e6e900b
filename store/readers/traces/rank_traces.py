"""Read a job's profiler traces, one per rank, and compute the parts of each step.

    for trace, parts in read_rank_traces(survey(folder)):
        trace.rank, parts["step"], parts["exposed"]      # milliseconds, one value per step

A step consists of compute, exposed communication, copies that overlap neither, and idle time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from store.arrays import Floats
from store.readers.traces.ascend_steps import is_ascend_steps, read_ascend_steps
from store.readers.traces.intervals import intersection, overlap, union
from store.readers.traces.kineto import RankTrace, read_trace
from store.readers.traces.nsys import is_nsys, read_nsys
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import NO_RANK, SourceError, Survey, head

__all__ = ["PARTS", "Steps", "breakdown", "read_rank_traces"]

PARTS = ("step", "compute", "communication", "exposed", "copies", "idle", "data")
Steps = tuple[RankTrace, dict[str, Floats]]


def read_rank_traces(found: Survey) -> list[Steps]:
    """Read the traces, one per rank, ordered by rank. Unreadable files are listed in `found.problems`."""
    by_rank: dict[int, Steps] = {}
    unnamed: list[tuple[Path, str]] = []
    traces: list[RankTrace] = []
    for path in found.paths:
        try:
            traces.append(_read(path, is_only=len(found.paths) == 1))
        except SourceError as error:
            if str(error).startswith(NO_RANK):
                unnamed.append((path, str(error)))
            else:
                found.add_problem(path, str(error))
    if len(unnamed) == 1 and not traces:  # this is the only readable file, so it needs no rank
        traces.append(_read(unnamed.pop()[0], is_only=True))
    for path, problem in unnamed:
        found.add_problem(path, problem)
    for trace in traces:
        path = trace.path
        if trace.problem:
            found.add_problem(path, f"{trace.problem}: read up to there ({trace.num_events:,} events)")
        if trace.damaged_events:
            found.add_problem(path, f"{trace.damaged_events:,} damaged events were left out")
        read = (trace, breakdown(trace))
        if trace.rank in by_rank:
            before = by_rank[trace.rank]
            if not (trace.marked and before[0].marked) or np.isin(trace.steps, before[0].steps).any():
                found.add_problem(path, f"is a second trace of rank {trace.rank}: {before[0].path.name} was read")
                continue
            read = _joined(before, read)
        by_rank[trace.rank] = read
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read(path: Path, *, is_only: bool) -> RankTrace:
    is_steps = is_ascend_steps(head(path, 4096))
    read_one = read_ascend_steps if is_steps else read_nsys if is_nsys(path) else read_trace
    return confined(read_one, path, is_only=is_only)


def _joined(a: Steps, b: Steps) -> Steps:
    """Join two cycles of the profiler's schedule, written to separate files, into one trace."""
    steps = np.concatenate([a[0].steps, b[0].steps])
    order = np.argsort(steps)
    parts = {part: np.concatenate([a[1][part], b[1][part]])[order] for part in PARTS}
    return replace(a[0], steps=steps[order]), parts


def breakdown(trace: RankTrace) -> dict[str, Floats]:
    """Milliseconds per step: step, compute, communication, exposed, copies, idle, data. One array of shape (steps,)
    each.
    """
    kernels = union(*(np.concatenate(pair) for pair in zip(trace.compute, trace.communication, strict=True)))
    busy = union(*(np.concatenate(pair) for pair in zip(kernels, trace.copies, strict=True)))
    hidden = intersection(trace.communication, trace.compute)
    windows = (trace.begin_us, trace.end_us)
    step = trace.end_us - trace.begin_us
    communication = overlap(trace.communication, *windows)
    exposed = communication - overlap(hidden, *windows)
    in_use = overlap(busy, *windows)
    copies = in_use - overlap(kernels, *windows)
    data = overlap(trace.data, *windows)
    if trace.device != "cpu":  # data loading costs only the time in which the device idles
        data = data - overlap(intersection(trace.data, busy), *windows)
    compute = overlap(trace.compute, *windows)
    parts = dict(zip(PARTS, (step, compute, communication, exposed, copies, step - in_use, data), strict=True))
    return {part: np.maximum(values, 0.0) / 1e3 for part, values in parts.items()}
