"""Ranks of older attempts that still run on a node, and the end of the run there, for `watch`."""

from __future__ import annotations

from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["has_ended", "stale_ranks"]


def stale_ranks(source: Source, node_rank: int) -> list[tuple[int, int, int, int]]:
    """(attempt, rank, pid, start_ticks) of this node's ranks of older attempts that have not closed."""
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


def has_ended(source: Source, node_rank: int = 0) -> bool:
    """Return True if the launcher of a node reported the end of the run there, and none has started since."""
    log = EventLog.load(source, (event_kinds.RUN_STARTED, event_kinds.RUN_ENDED))

    def newest_ns(kind: str) -> int:
        return max((event.wall_ns for event in log.of(kind) if event.integer("node_rank", 0) == node_rank), default=0)

    return newest_ns("run_ended") > newest_ns("run_started")
