"""The gap between phases in which the host of a rank on a GPU is longer than the hosts of its peers.

    host_gap(source, attempt=0, slow=straggler, peers=[0, 1, 2])      # "after_optimizer", or ""

Calls tell that such a rank is slow, and not where. The host's gaps are known by its spans, and a host that sleeps or
computes between two phases makes its device late. But a loop that reads a value back waits there for its device, and
in a rank whose device is slow longer: a gap in which the peers spend time, too, names no place.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.policy import SHARED
from analyzers.source import Source
from analyzers.stragglers.newest_steps import in_newest_steps
from analyzers.stragglers.peer_comparison import Straggler
from probes.step_clock import GAPS, PHASE_COLUMNS
from probes.tape.schema import TABLES

__all__ = ["host_gap"]

_NAMES = [column.name.removesuffix("_ns") for column in TABLES["steps"].columns]
_GAP_BEFORE = {kind: _NAMES[columns.gap] for kind, columns in PHASE_COLUMNS.items()}
_TRANSFERS = ("send", "recv")


def host_gap(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> str:
    """Return the gap that holds a slow rank's excess on its host; empty if none does, or a device may cause it."""
    own, usual = in_newest_steps(source, attempt, slow, peers, _median_gaps_ms)
    excess = {gap: own[gap] - usual[gap] for gap in own if gap in usual}
    if not excess:
        return ""
    place = max(excess, key=lambda gap: excess[gap])
    is_enough = excess[place] >= SHARED.agreement_ratio * slow.excess_ms
    return place if is_enough and usual[place] <= (1 - SHARED.agreement_ratio) * excess[place] else ""


def _median_gaps_ms(
    source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int
) -> dict[str, float]:
    """Gaps between the spans of phases and transfers, each named by the phase that follows, as the step clock does."""
    names = "CASE kind " + " ".join(f"WHEN '{kind}' THEN '{gap}'" for kind, gap in _GAP_BEFORE.items()) + " END"
    known = ", ".join(f"'{kind}'" for kind in (*_GAP_BEFORE, *_TRANSFERS))
    sums = ", ".join(f"coalesce(sum(took) FILTER (gap = '{gap}'), 0) / 1e6 AS {gap}" for gap in GAPS)
    rows = source.rows(
        f"""
        WITH bounds AS (
            SELECT rank, step, start_ns AS begin_ns, start_ns + duration_ns AS finish_ns FROM steps
            WHERE attempt = ? AND rank IN (SELECT unnest(?::INTEGER[])) AND step BETWEEN ? AND ?
                  AND duration_ns IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY start_ns DESC) = 1),
        parts AS (
            SELECT rank, step, begin_ns, s.start_ns, s.end_ns, {names} AS gap
            FROM spans s JOIN bounds USING (rank, step)
            WHERE s.attempt = ? AND s.start_ns >= begin_ns AND s.end_ns <= finish_ns AND s.kind IN ({known})
            UNION ALL SELECT rank, step, begin_ns, finish_ns, finish_ns, 'after_optimizer' FROM bounds),
        gaps AS (
            SELECT rank, step, greatest(0, start_ns - coalesce(max(end_ns) OVER former, begin_ns)) AS took,
                   first_value(gap IGNORE NULLS) OVER (PARTITION BY rank, step ORDER BY start_ns, end_ns
                       ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS gap,
                   count(*) OVER (PARTITION BY rank, step) AS num_parts
            FROM parts WINDOW former AS (PARTITION BY rank, step ORDER BY start_ns, end_ns
                                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
        sums AS (SELECT rank, step, {sums} FROM gaps WHERE num_parts > 1 GROUP BY rank, step)
        SELECT {", ".join(f"CAST(median({gap}) AS DOUBLE)" for gap in GAPS)} FROM sums
        """,
        [attempt, list(ranks), first_step, last_step, attempt],
    )
    return {gap: ms for gap, ms in zip(GAPS, rows[0], strict=True) if ms is not None}
