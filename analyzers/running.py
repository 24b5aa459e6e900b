"""What is running on a node, for `watch`: the ranks of the newest attempt, and whether the run has ended."""

from __future__ import annotations

from .source import Source

__all__ = ["has_ended", "ranks_on_node"]


def ranks_on_node(source: Source, node_rank: int) -> tuple[int, dict[int, int]]:
    """(newest attempt, {rank: pid}) of the ranks on this node that have not closed."""
    rows = source.rows(
        """
        SELECT attempt, rank, arg_max(pid, wall_ns) FROM ranks
        WHERE node_rank = ? AND attempt = (SELECT max(attempt) FROM ranks)
          AND (attempt, rank) NOT IN (SELECT (attempt, rank) FROM events WHERE kind = 'rank_closed')
        GROUP BY ALL ORDER BY rank
        """,
        [node_rank],
    )
    return (int(rows[0][0]) if rows else 0), {int(rank): int(pid) for _, rank, pid in rows}


def has_ended(source: Source) -> bool:
    """Whether the launcher has said that the run is over."""
    return bool(source.rows("SELECT 1 FROM events WHERE kind = 'run_ended' LIMIT 1"))
