"""Times in which ranks trained and nothing watched them: `watch` had died or stood still.

1. `watch` reads its host once a second: a gap between two readings, or after the last one, is a time without it.
2. A gap counts if ranks of that host began and finished steps in it, over at least `StallPolicy.unwatched_s`.
3. Hosts with few readings, or without health readings, are left out: nothing is known of their watch.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.policy import StallPolicy
from analyzers.scope import Scope
from analyzers.source import Source, lacking, missing_tables

__all__ = ["unwatched_times"]

_GAPS = """
    WITH readings AS (
        SELECT node, sample_ns, lead(sample_ns) OVER (PARTITION BY node ORDER BY sample_ns) AS next_ns
        FROM health WHERE device = 'host'
    ), frequent AS (
        SELECT node FROM readings GROUP BY node
        HAVING count(*) >= ? AND median(next_ns - sample_ns) <= ?
    )
    SELECT node, sample_ns, next_ns FROM readings
    WHERE node IN (SELECT node FROM frequent) AND (next_ns IS NULL OR next_ns - sample_ns > ?)
    ORDER BY node, sample_ns
"""
_STEPS = """
    SELECT s.attempt, min(s.step), max(s.step), min(s.start_ns), max(s.start_ns + s.duration_ns)
    FROM steps s WHERE s.start_ns > ? AND s.start_ns + s.duration_ns < ?
    AND (s.attempt, s.rank) IN (SELECT (attempt, rank) FROM ranks WHERE host = ?)
    GROUP BY s.attempt
"""
_NEVER = 1 << 62


def unwatched_times(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """One finding of kind `records` for each attempt with such a time, about the longest."""
    policy = policy or StallPolicy()
    needed = {"health": ("node", "device", "sample_ns"), "ranks": ("host",)}
    if scope.is_live or missing_tables(source, *needed, "steps") or lacking(source, **needed):
        return []
    gap_ns = int(policy.unwatched_s * 1e9)
    longest: dict[int, tuple[int, str, int, int]] = {}
    for node, begin, end in source.rows(_GAPS, [SHARED.history, int(policy.sign_of_life_s * 1e9), gap_ns]):
        found = source.rows(_STEPS, [begin, end or _NEVER, node])
        for attempt, first, last, from_ns, to_ns in found:
            if to_ns - from_ns > max(gap_ns, longest.get(attempt, (0,))[0]):
                longest[attempt] = (to_ns - from_ns, str(node), first, last)
    return [
        Finding.insufficient(
            "coverage",
            "records",
            f"Nothing watched the ranks on {node} from step {first} to {last} ({length_ns / 1e9:.0f} s): "
            "a rank that hung or stopped then was not reported.",
            attempt=attempt,
        )
        for attempt, (length_ns, node, first, last) in sorted(longest.items())
        if scope.attempt in (None, attempt)
    ]
