"""Exposed communication of stamped GPUs, compared with torch's profiler in the same steps of the same ranks.

    check = against_traces(source, attempt=0)      # None without captures of stamped steps
    check.stamped_ratio, check.traced_ratio        # shares of the step, medians over the captures
    check.gap_ratio                                # how far the trace lies outside what the stamps allow
    contradiction(source, attempt=0)               # why exposed communication is not judged, or ""

A trace records each kernel; a stamp only shows that the compute stream stood still. So the trace shows where stamps are
wrong, for example because a kernel queues behind a kernel of another stream without waiting for it (few hardware
queues). Communication in flight while the device waited for its host may count as exposed or not: any share between the
two is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analyzers.account.device.measured_by import is_stamped
from analyzers.account.device.stalls import StallParts, stall_parts
from analyzers.policy import SHARED
from analyzers.profiling.captures import EVENTS, captures
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from analyzers.wording import is_number, percent

__all__ = ["TraceCheck", "against_traces", "contradiction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCheck:
    """Medians over the captures."""

    captures: int
    stamped_ratio: float
    """Exposed share of the step according to the stamps."""
    traced_ratio: float
    """Exposed share of the step according to the profiler."""
    gap_ratio: float
    """Distance of the traced share from the range that the stamps allow, as a share of the step; 0 within the range."""


def contradiction(source: Source, attempt: int) -> str:
    """Return why exposed communication of the attempt is not judged, as a clause; empty if no trace contradicts it."""
    check = against_traces(source, attempt) if is_stamped(source, attempt) else None
    if check is None or check.gap_ratio <= SHARED.equal_ratio:
        return ""
    return (
        f"exposed share of the same steps: {percent(check.traced_ratio)} by torch's profiler, "
        f"{percent(check.stamped_ratio)} by events on the compute stream"
    )


def against_traces(source: Source, attempt: int) -> TraceCheck | None:
    """Compare each capture with the stamped steps in it."""
    traced = [
        (one["rank"], one["first_step"], one["last_step"], one["parts_ms"])
        for one in captures(EventLog.load(source, EVENTS, attempt))
        if one["parts_ms"] is not None and not one["problem"]
    ]
    traced = [one for one in traced if is_number(one[3].get("exposed")) and is_number(one[3].get("step"))]
    if not traced:
        return None
    since, until = min(first for _, first, _, _ in traced), max(last for _, _, last, _ in traced)
    ranks = ", ".join(sorted({str(int(rank)) for rank, *_ in traced}))
    durations: dict[tuple[int, int], int] = {
        (rank, step): took
        for rank, step, took in source.rows(
            "SELECT rank, step, max(duration_ns) FROM steps WHERE attempt = ? AND duration_ns > 0 "
            f"AND step BETWEEN ? AND ? AND rank IN ({ranks}) GROUP BY rank, step",
            [attempt, since, until],
        )
    }
    parts = [
        part
        for part in stall_parts(source, attempt, since_step=since, until_step=until)
        if (part.rank, part.step) in durations
    ]
    found = []
    for rank, first, last, of_trace in traced:
        stamped = [part for part in parts if part.rank == rank and first <= part.step <= last]
        if stamped and of_trace["step"] > 0:
            found.append(_compared(stamped, durations, of_trace["exposed"] / of_trace["step"]))
    if not found:
        return None
    exposed, traced_ratio, gap = np.median(np.array(found), axis=0)
    return TraceCheck(
        captures=len(found), stamped_ratio=float(exposed), traced_ratio=float(traced_ratio), gap_ratio=float(gap)
    )


def _compared(
    stamped: list[StallParts], durations: dict[tuple[int, int], int], traced: float
) -> tuple[float, float, float]:
    took = sum(durations[part.rank, part.step] for part in stamped)
    least = sum(part.exposed_ns for part in stamped) / took
    most = least + sum(part.host_in_flight_ns for part in stamped) / took
    return least, traced, max(0.0, least - traced, traced - most)
