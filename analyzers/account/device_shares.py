"""Shares of the device time of ranks on GPUs whose steps were not stamped, as far as their calls prove them.

    shares = device_shares(source, attempt=0)
    shares[3].device, shares[3].in_flight, shares[3].waiting, shares[3].data       # together 1

Calls say when communication was in flight, and the least that a rank waited in it (`device_timings`). While none was in
flight the device worked or was idle: own time, in a phase that is not known. While one was, it may have computed
hidden or not: that time is not divided further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analyzers.account.device_timings import device_rows
from analyzers.source import Source, floats, ints

__all__ = ["DeviceShares", "device_shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """Shares of a rank's step time without checkpoints and evaluations; they add up to 1."""

    data: float
    """Loading that made the rank later than its peers."""
    device: float
    """No communication in flight."""
    in_flight: float
    """Communication in flight, hidden behind computing or not."""
    waiting: float
    """Waiting for others in communication, at least."""


def device_shares(source: Source, attempt: int, *, since_step: int = 0) -> dict[int, DeviceShares]:
    """By rank. Pure."""
    table = device_rows(source, attempt, since_step=since_step)
    rows = source.rows(
        """
        SELECT rank, sum(greatest(end_ns - greatest(issue_ns, coalesce(before_ns, issue_ns)), 0))::DOUBLE / 1e6 FROM (
            SELECT rank, issue_ns, end_ns, max(end_ns) OVER (PARTITION BY rank ORDER BY issue_ns, end_ns
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
            FROM collectives WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND rank >= 0)
        GROUP BY rank
        """,
        [attempt, since_step],
    )
    in_flight = {int(rank): float(ms) for rank, ms in rows}
    ranks = ints(table["rank"])
    found = {}
    for rank in np.unique(ranks).tolist():
        own = ranks == rank
        total, waiting, data = (float(floats(table[name])[own].sum()) for name in ("duration", "wait", "data"))
        if total <= 0:
            continue
        busy = min(max(in_flight.get(rank, 0.0), waiting), total - data)
        found[rank] = DeviceShares(
            data=data / total, device=(total - data - busy) / total, in_flight=(busy - waiting) / total,
            waiting=waiting / total,
        )  # fmt: skip
    return found
