"""Transfer time and bus bandwidth of collectives by operation, group and size, relative to the fastest.

    for call in call_classes(source, attempt=0):
        call.op, call.process_group, call.num_bytes, call.bus_gb_per_s, call.relative_bandwidth_ratio

* The last member to enter a call does not wait in it: its time, the shortest of all members, is the transfer time. If
  earlier calls of the group are still in flight, the call is timed from their end, because they occupy the link.
* *Bus bandwidth* makes operations and group sizes comparable: the bytes that a ring sends over each link, divided by
  the transfer time. The bytes are 2 (N - 1) / N of the data for an all_reduce, and (N - 1) / N for an all_gather,
  reduce_scatter or all_to_all. A ring is as fast as its slowest link, so this value depends on the hardware and not on
  N.
* The reference is the highest bus bandwidth of any class in the run, taken as what the hardware can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.device.exposure import GROUPS_IN_ORDER, SIZE_OF_CALL
from analyzers.source import READ_STEPS, Source, every_kth
from analyzers.wording import group_text

__all__ = ["CallClass", "call_classes", "call_columns", "latency_ms"]

MAX_CALLS = 2_000_000
"""Larger tables of collectives are sampled: only every k-th step is read."""
_FACTORS = {"all_reduce": "2.0 * (n - 1) / n", "all_gather": "(n - 1)", "reduce_scatter": "(n - 1.0) / n",
            "all_to_all": "(n - 1.0) / n"}  # fmt: skip
"""Bytes over each ring link, relative to the recorded bytes. These are a rank's input, which for an all_gather is 1 / N
of the data."""
_COLUMNS = ("op", "process_group", "bytes", "n", "num_calls", "transfer_ms", "bus_gb_per_s", "wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClass:
    """Calls with the same operation, group and size."""

    op: str
    process_group: str
    num_bytes: int
    num_members: int
    num_calls: float
    transfer_ms: float
    """Mean transfer time of the calls in a step; median over the steps."""
    bus_gb_per_s: float
    wait_s: float
    """Total wait of all members over the run; NaN if no wait was measured, as on GPUs without stamps."""
    relative_bandwidth_ratio: float
    """Bus bandwidth relative to the fastest class in the run."""

    @property
    def dimension(self) -> str:
        """The mesh dimension of the group: dp_replicate, tp, world, ..."""
        return self.process_group.partition(":")[0]

    @property
    def bus_bytes(self) -> float:
        """Bytes that a ring sends over each link for one call."""
        return self.bus_gb_per_s * self.transfer_ms * 1e6

    @property
    def text(self) -> str:
        """Operation, size and group as text."""
        size = f"{self.num_bytes} B"
        if self.num_bytes >= 2**20:
            size = f"{self.num_bytes / 2**20:.3g} MiB"
        elif self.num_bytes >= 2**10:
            size = f"{self.num_bytes / 2**10:.3g} KiB"
        return f"{self.op} of {size} in {group_text(self.process_group)}"


def call_classes(source: Source, attempt: int, *, phases: Sequence[str] = ()) -> list[CallClass]:
    """Classes of an attempt's collectives in `phases` (empty: all), by descending wait.

    Point-to-point calls, barriers and calls without bytes or measured time are left out.
    """
    found = call_columns(source, attempt=attempt, phases=phases)
    rows = [
        (str(op or ""), str(group or ""), int(size or 0), int(members), float(calls), float(took), float(speed),
         math.nan if wait is None else float(wait))
        for op, group, size, members, calls, took, speed, wait in zip(
            *(found[name].tolist() for name in _COLUMNS), strict=True
        )
        if op not in ("send", "recv", "barrier") and members > 1 and size and took and speed
    ]  # fmt: skip
    best = max((row[6] for row in rows), default=0.0)
    return [
        CallClass(op=op, process_group=group, num_bytes=size, num_members=members, num_calls=calls, transfer_ms=took,
                  bus_gb_per_s=speed, wait_s=wait, relative_bandwidth_ratio=speed / best)
        for op, group, size, members, calls, took, speed, wait in rows
    ]  # fmt: skip


def call_columns(
    source: Source, *, attempt: int | None = None, phases: Sequence[str] = (), limit: int = 1_000
) -> dict[str, npt.NDArray]:  # type: ignore[type-arg]
    """Columns op, process_group, bytes, n (members), num_calls, transfer_ms (median of steps), bus_gb_per_s, wait_s.

    Ordered by descending wait; empty columns without recorded calls. A send or recv has no transfer time and no
    bandwidth, because its duration includes the wait for the other rank. In long runs every k-th step is read, and
    calls and waits are scaled up.
    """
    if not source.has("collectives"):
        return {name: np.zeros(0) for name in _COLUMNS}
    every = every_kth(source, "collectives", MAX_CALLS, READ_STEPS)
    factor = " ".join(f"WHEN '{op}' THEN {text}" for op, text in _FACTORS.items())
    only = "" if attempt is None else f" AND attempt = {int(attempt)}"
    only += f" AND phase IN ({', '.join('?' * len(phases))})" if phases else ""
    return source.query(
        f"""
        SELECT op, process_group, bytes, n, num_calls, wait_s,
               CASE WHEN op NOT IN ('send', 'recv') THEN took_ms END AS transfer_ms,
               bytes * CASE op {factor} ELSE 1.0 END / nullif(transfer_ms, 0) / 1e6 AS bus_gb_per_s
        FROM (SELECT op, process_group, bytes, max(n) AS n, CAST(sum(calls) AS DOUBLE) * {every} AS num_calls,
                     median(took) / 1e6 AS took_ms, CAST(sum(waited) AS DOUBLE) * {every} / 1e9 AS wait_s
              FROM (SELECT attempt, step, op, process_group, bytes, max(n) AS n, count(*) AS calls, avg(took) AS took,
                           sum(waited) AS waited
                    FROM (SELECT attempt, min(step) AS step, op, process_group, {SIZE_OF_CALL} AS bytes, count(*) AS n,
                                 min(own) AS took, sum(wait_ns) AS waited
                          FROM (SELECT *, greatest(0, end_ns - greatest(issue_ns, coalesce(max(end_ns) OVER (
                                           PARTITION BY attempt, rank, process_group, peer, step ORDER BY issue_ns, seq
                                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), issue_ns))) AS own
                                FROM collectives
                                WHERE end_ns IS NOT NULL AND rank >= 0 AND step % {every} = 0{only})
                          GROUP BY attempt, process_group, op, seq, CASE WHEN peer IS NULL THEN -1 ELSE rank END, peer)
                    GROUP BY attempt, step, op, process_group, bytes)
              GROUP BY op, process_group, bytes)
        ORDER BY wait_s DESC NULLS LAST, op, {GROUPS_IN_ORDER}, bytes LIMIT {int(limit)}
        """,
        list(phases),
    )


def latency_ms(small: CallClass, best_gb_per_s: float) -> float:
    """Part of a call's transfer time (ms) that its size does not explain at the best bandwidth."""
    return max(0.0, small.transfer_ms - small.bus_bytes / (best_gb_per_s * 1e6))
