"""Ranks of older attempts that still run on a node, for `watch`."""

from __future__ import annotations

from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["stale_ranks"]


def stale_ranks(source: Source, node_rank: int) -> list[tuple[int, int, int, int]]:
    """Return (attempt, rank, pid, start_ticks) of this node's ranks of older attempts that have not closed."""
    rows = source.rows(
        f"""
        SELECT attempt, rank, any_value(pid), any_value(start_ticks) FROM ranks
        WHERE node_rank = ? AND attempt < (SELECT max(attempt) FROM ranks) AND start_ticks IS NOT NULL
          AND (attempt, rank) NOT IN (SELECT (attempt, rank) FROM events WHERE kind = '{event_kinds.RANK_CLOSED}')
        GROUP BY ALL ORDER BY ALL
        """,
        [node_rank],
    )
    return [(int(attempt), int(rank), int(pid), int(ticks)) for attempt, rank, pid, ticks in rows]
