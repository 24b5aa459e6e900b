"""Arrival statistics of a rank: how often it enters a collective last, and the share of all waiting in which others
wait for it.

arrivals = load_arrivals(source, attempt=0, rank=3, first_step=40, last_step=90)
arrivals.caused_wait_ratio       # 0.93: nearly all waiting in the groups of rank 3 was for it
last_ranks(source)               # per group, the rank that is most often last, over all calls
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.policy import SHARED
from analyzers.source import Source
from analyzers.stragglers.comparison.peer_comparison import Straggler

__all__ = ["Arrivals", "LastRank", "last_ranks", "load_arrivals", "waits_ms", "without_late_by_others"]

FOLLOWED_STEPS = 20
"""Newest steps in which the waits of one slow rank for another are read."""
ARRIVAL_STEPS = 50
"""Maximum number of the newest slow steps from which collectives are read: enough for a percentage, and fast on any
run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Share of its collectives that a rank enters last, and the share of all waiting that it causes."""

    num_last: int
    num_checked: int
    caused_wait_ratio: float | None
    most_caused_wait_ratio: float | None = None
    """The largest share of the waiting that any one member of the rank's groups causes."""

    def evidence(self) -> dict[str, Any]:
        """Values for a finding's evidence; empty if no collective was recorded."""
        if not self.num_checked:
            return {}
        return {
            "arrives_last_ratio": round(self.num_last / self.num_checked, 3),
            "caused_wait_ratio": None if self.caused_wait_ratio is None else round(self.caused_wait_ratio, 3),
            "collectives_checked": self.num_checked,
        }


def load_arrivals(
    source: Source, attempt: int, rank: int, first_step: int, last_step: int, *, within_stages: bool = False
) -> Arrivals:
    """Read arrivals: the member with the shortest time in a collective was last, and the others waited the difference.

    `within_stages`: read only groups in which members send each other no messages, because between pipeline stages the
    schedule decides which member is last.
    """
    if not source.has("collectives"):
        return Arrivals(num_last=0, num_checked=0, caused_wait_ratio=None)
    first = max(first_step, last_step - ARRIVAL_STEPS)
    rows = source.rows(
        """
        WITH asked AS (
            SELECT rank, peer, process_group, seq, op, end_ns - issue_ns AS took
            FROM collectives WHERE attempt = ? AND step BETWEEN ? AND ? AND end_ns IS NOT NULL),
        calls AS (SELECT * FROM asked WHERE op NOT IN ('send', 'recv')),
        pairs AS (SELECT DISTINCT rank, peer FROM asked WHERE ? AND op IN ('send', 'recv')),
        members AS (SELECT DISTINCT process_group, rank FROM calls),
        across AS (SELECT DISTINCT one.process_group FROM members one JOIN pairs USING (rank)
                   JOIN members other ON other.process_group = one.process_group AND other.rank = pairs.peer)
        SELECT shortest, count(*), sum(waited_ns) FROM (
            SELECT arg_min(rank, took) AS shortest, CAST(sum(took) - count(*) * min(took) AS DOUBLE) AS waited_ns
            FROM calls ANTI JOIN across USING (process_group)
            GROUP BY process_group, seq HAVING count(*) > 1 AND bool_or(rank = ?)
        ) GROUP BY shortest
        """,
        [attempt, first, last_step, within_stages, rank],
    )
    caused_ns = {last: waited_ns for last, _, waited_ns in rows}
    whole_ns = sum(caused_ns.values())
    return Arrivals(
        num_last=sum(number for last, number, _ in rows if last == rank),
        num_checked=sum(number for _, number, _ in rows),
        caused_wait_ratio=caused_ns.get(rank, 0.0) / whole_ns if whole_ns else None,
        most_caused_wait_ratio=max(caused_ns.values()) / whole_ns if whole_ns else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRank:
    """The rank that entered most calls of a group last, over the calls that all members made."""

    rank: int
    num_ranks: int
    arrivals: Arrivals
    wait_ratio: float
    """Share of the other members' time in these calls that is waiting for this rank."""
    median_wait_ms: float
    """Median wait of another member in calls that this rank entered last (ms)."""
    lost_s: float
    """Sum of the longest wait of each of those calls (s)."""


def last_ranks(source: Source) -> list[LastRank]:
    """One `LastRank` per group that has calls made by all its members."""
    rows = source.rows(
        """
        WITH calls AS (
            SELECT process_group, rank, end_ns - issue_ns AS took, count(*) OVER call AS num_ranks,
                   arg_min(rank, end_ns - issue_ns) OVER call AS last, min(end_ns - issue_ns) OVER call AS shortest,
                   seq, count(DISTINCT rank) OVER (PARTITION BY process_group) AS num_members
            FROM collectives WHERE end_ns IS NOT NULL AND op NOT IN ('send', 'recv')
            WINDOW call AS (PARTITION BY process_group, seq)),
        whole AS (SELECT * FROM calls WHERE num_ranks = num_members AND num_members > 1),
        waits AS (
            SELECT process_group, last, count(DISTINCT seq) AS num_last, sum(took - shortest) AS waited_ns,
                   median(took - shortest) FILTER (rank <> last) / 1e6 AS median_ms
            FROM whole GROUP BY process_group, last),
        longest AS (
            SELECT process_group, last, sum(ns) / 1e9 AS lost_s FROM (
                SELECT process_group, last, max(took - shortest) AS ns FROM whole GROUP BY process_group, last, seq)
            GROUP BY process_group, last),
        groups AS (SELECT process_group, any_value(num_members) AS num_ranks, count(DISTINCT seq) AS num_calls
                   FROM whole GROUP BY process_group)
        SELECT last, num_ranks, num_last, num_calls, CAST(waited_ns AS DOUBLE),
               CAST(sum(waited_ns) OVER (PARTITION BY process_group) AS DOUBLE), median_ms, lost_s,
               (SELECT CAST(sum(took) AS DOUBLE) FROM whole
                WHERE whole.process_group = waits.process_group AND whole.rank <> waits.last)
        FROM waits JOIN longest USING (process_group, last) JOIN groups USING (process_group)
        QUALIFY num_last = max(num_last) OVER (PARTITION BY process_group)
            AND last = min(last) OVER (PARTITION BY process_group, num_last) ORDER BY process_group
        """
    )
    return [
        LastRank(
            rank=rank, num_ranks=num_ranks, median_wait_ms=float(median_ms), lost_s=float(lost_s),
            wait_ratio=waited_ns / max(others_ns, 1.0),
            arrivals=Arrivals(num_last=num_last, num_checked=num_calls,
                              caused_wait_ratio=waited_ns / all_ns if all_ns else None),
        )
        for rank, num_ranks, num_last, num_calls, waited_ns, all_ns, median_ms, lost_s, others_ns in rows
    ]  # fmt: skip


def waits_ms(
    source: Source, attempt: int, ranks: Sequence[int], culprit: int, first_step: int, last_step: int
) -> dict[int, float]:
    """Upper bound on how long `ranks` waited for the culprit: {step: milliseconds, mean over the ranks}.

    Counts the collectives that the culprit entered last of all members. The time counts even if the waiting rank
    computed meanwhile. Steps without such a call are left out.
    """
    rows = source.rows(
        """
        SELECT step, CAST(sum(took - shortest) / 1e6 / ? AS DOUBLE) FROM (
            SELECT rank, step, end_ns - issue_ns AS took, min(end_ns - issue_ns) OVER call AS shortest,
                   arg_min(rank, end_ns - issue_ns) OVER call AS last
            FROM collectives
            WHERE attempt = ? AND step BETWEEN ? AND ? AND end_ns IS NOT NULL AND op NOT IN ('send', 'recv')
            WINDOW call AS (PARTITION BY process_group, seq)
        ) WHERE list_contains(?::BIGINT[], rank) AND last = ? GROUP BY step
        """,
        [max(1, len(ranks)), attempt, first_step, last_step, list(ranks), culprit],
    )
    return {int(step): float(ms) for step, ms in rows}


def without_late_by_others(source: Source, attempt: int, slow: Sequence[Straggler]) -> list[Straggler]:
    """Drop ranks whose excess may be time in which they waited for others, where only calls show the waiting."""
    waited_for = [one for one in slow if _is_waited_for(source, attempt, one)]
    return [one for one in waited_for if not any(_follows(source, attempt, one, other) for other in waited_for)]


def _is_waited_for(source: Source, attempt: int, slow: Straggler) -> bool:
    """Return False if another member of its groups causes far more waiting than the rank. Calls give a lower bound of
    waiting, so a rank that waits in many calls, as in a group with a slow link, seems to work for a part of that time.
    """
    if not slow.has_peers:
        return True
    arrivals = load_arrivals(source, attempt, slow.rank, slow.first_step, slow.last_step, within_stages=True)
    caused, most = arrivals.caused_wait_ratio, arrivals.most_caused_wait_ratio
    return caused is None or most is None or most - caused < SHARED.minor_ratio


def _follows(source: Source, attempt: int, one: Straggler, slower: Straggler) -> bool:
    """Return True if a rank's excess may be time in which it waited for a slower rank. For example, the partners of a
    slow shard are late in their other groups. Calls give only a lower bound of waiting, so this cannot be excluded.
    """
    first, last = max(one.first_step, slower.first_step), min(one.last_step, slower.last_step)
    if one.rank == slower.rank or first > last or one.excess_ms >= slower.excess_ms:
        return False
    first = max(first, last - FOLLOWED_STEPS)
    waited = waits_ms(source, attempt, [one.rank], slower.rank, first, last)
    return sum(waited.values()) / (last - first + 1) >= one.excess_ms
