"""Arrival statistics of a rank: how often it is last into a collective, and its share of all waiting.

arrivals = load_arrivals(source, attempt=0, rank=3, first_step=40, last_step=90)
arrivals.caused_wait_ratio       # 0.93: nearly all waiting in the groups of rank 3 was for it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analyzers.source import Source

__all__ = ["Arrivals", "load_arrivals"]

ARRIVAL_STEPS = 50
"""Newest slow steps whose collectives are read: enough for a percentage, little enough for any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Share of its collectives that a rank enters last, and its share of all waiting."""

    num_last: int
    num_checked: int
    caused_wait_ratio: float | None
    most_caused_wait_ratio: float | None = None
    """The largest share of the waiting that one rank causes, this one or another member of its groups."""

    def evidence(self) -> dict[str, Any]:
        """Values for a finding's evidence; empty if no collective was recorded."""
        if not self.num_checked:
            return {}
        return {
            "arrives_last_ratio": round(self.num_last / self.num_checked, 3),
            "caused_wait_ratio": None if self.caused_wait_ratio is None else round(self.caused_wait_ratio, 3),
            "collectives_checked": self.num_checked,
        }


def load_arrivals(source: Source, attempt: int, rank: int, first_step: int, last_step: int) -> Arrivals:
    """Read them: the member with the shortest time in a collective came last, and the others waited the difference."""
    if not source.has("collectives"):
        return Arrivals(num_last=0, num_checked=0, caused_wait_ratio=None)
    first = max(first_step, last_step - ARRIVAL_STEPS)
    rows = source.rows(
        """
        SELECT shortest, count(*), sum(waited_ns) FROM (
            SELECT arg_min(rank, end_ns - issue_ns) AS shortest,
                   CAST(sum(end_ns - issue_ns) - count(*) * min(end_ns - issue_ns) AS DOUBLE) AS waited_ns
            FROM collectives
            WHERE attempt = ? AND step BETWEEN ? AND ? AND end_ns IS NOT NULL AND op NOT IN ('send', 'recv')
            GROUP BY process_group, seq HAVING count(*) > 1 AND bool_or(rank = ?)
        ) GROUP BY shortest
        """,
        [attempt, first, last_step, rank],
    )
    caused_ns = {last: waited_ns for last, _, waited_ns in rows}
    whole_ns = sum(caused_ns.values())
    return Arrivals(
        num_last=sum(number for last, number, _ in rows if last == rank),
        num_checked=sum(number for _, number, _ in rows),
        caused_wait_ratio=caused_ns.get(rank, 0.0) / whole_ns if whole_ns else None,
        most_caused_wait_ratio=max(caused_ns.values()) / whole_ns if whole_ns else None,
    )
