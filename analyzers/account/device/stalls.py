"""Split the time in which a GPU stood still by cause, from its timed stalls and the collectives of all ranks.

    for part in stall_parts(source, attempt=0):
        part.rank, part.step, part.exposed_ns, part.late_ns, part.host_ns, part.host_in_flight_ns

A collective's kernel spins until the last member joins. The time it spins is its duration minus the shortest duration
among the members. Where a stall of the compute stream overlaps the spinning, the device waited for a late member;
elsewhere it waited for the transfer. If a device waited for its host while communication was in flight, the two causes
cannot be told apart.
"""

from __future__ import annotations

from typing import NamedTuple

from analyzers.source import Source, lacking, missing_tables

__all__ = ["StallParts", "stall_parts"]


class StallParts(NamedTuple):
    """Sums of one rank's step, nanoseconds."""

    rank: int
    step: int
    exposed_ns: int
    late_ns: int
    """Part of `exposed_ns` spent waiting for a late member."""
    host_ns: int
    host_in_flight_ns: int
    """Part of `host_ns` in which communication was in flight."""


def stall_parts(
    source: Source, attempt: int, *, since_step: int = 0, until_step: int = 1 << 60, every: int = 1
) -> list[StallParts]:
    """Stalls of every k-th step by rank and step; empty without stalls, or without the calls needed to split them."""
    if missing_tables(source, "device_stalls") or lacking(source, collectives=("issue_ns", "end_ns", "seq")):
        return []
    rows = source.rows(
        """
        WITH calls AS (
            SELECT rank, issue_ns, end_ns,
                   greatest(end_ns - min(end_ns - issue_ns) OVER (
                       PARTITION BY process_group, seq,
                                    CASE op WHEN 'send' THEN rank WHEN 'recv' THEN peer END,
                                    CASE op WHEN 'send' THEN peer WHEN 'recv' THEN rank END), issue_ns) AS joined_ns
            FROM collectives
            WHERE attempt = $1 AND step BETWEEN $2 - 1 AND $4 + 1 AND end_ns >= issue_ns AND rank >= 0),
        stalls AS (
            SELECT row_number() OVER () AS id, rank, step, waits_for = 'host' AS is_host, start_ns, end_ns
            FROM device_stalls
            WHERE attempt = $1 AND step BETWEEN $2 AND $4 AND step % $3 = 0 AND end_ns > start_ns),
        over_calls AS (
            SELECT s.id, sum(greatest(least(s.end_ns, c.joined_ns) - greatest(s.start_ns, c.issue_ns), 0)) AS late,
                   sum(least(s.end_ns, c.end_ns) - greatest(s.start_ns, c.issue_ns)) AS busy
            FROM stalls s JOIN calls c ON s.rank = c.rank AND c.issue_ns < s.end_ns AND c.end_ns > s.start_ns
            GROUP BY s.id)
        SELECT rank, step,
               coalesce(sum(end_ns - start_ns) FILTER (NOT is_host), 0)::BIGINT,
               coalesce(sum(least(end_ns - start_ns, late)) FILTER (NOT is_host), 0)::BIGINT,
               coalesce(sum(end_ns - start_ns) FILTER (is_host), 0)::BIGINT,
               coalesce(sum(least(end_ns - start_ns, busy)) FILTER (is_host), 0)::BIGINT
        FROM stalls LEFT JOIN over_calls USING (id) GROUP BY rank, step ORDER BY rank, step
        """,
        [attempt, since_step, every, until_step],
    )
    return [StallParts(*row) for row in rows]
