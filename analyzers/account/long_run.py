"""Runs of hundreds of millions of step rows, reduced to sessions that are small enough to query many times.

    views = reduced_views(source)                       # all three are the source up to `MAX_ROWS` rows of steps
    views.compared.rows("SELECT ... FROM steps")        # all ranks, in the steps that tell who changes and when
    views.sampled.rows("SELECT ... FROM steps")         # all ranks, steps at even distances, and every begin and end
    views.histories.rows("SELECT ... FROM steps")       # some ranks, whole

A query that reads every row takes seconds where there are 400 million, and analyzers run some sixty. So all rows are
read four times, each time for many queries. The rows picked become a session of the store (`Store.session`), in which
the relation `steps` holds only these. The four reads:

1. One line for each rank of an attempt: how many steps it has, and whether it has the loss.
2. The whole history of some ranks: it answers for what one rank records (losses, rollbacks) and what recurs every n
   steps (evaluations, checkpoints).
3. `downsampling` finds where a rank changes against the others.
4. All ranks in the steps chosen so, in the first and last ones of each attempt, and whatever never ended. The begin
   and the end of each rank's records are exact in it, medians and shares come from steps at even distances.

Sums over all steps (goodput, tokens) and single rows (a value that is not finite) are asked of the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from analyzers.account.downsampling import choose
from analyzers.source import Source
from store import Store

__all__ = ["MAX_ROWS", "MEMORY_BYTES", "Views", "reduced_views", "whole_views"]

MAX_ROWS = 30_000_000
MEMORY_BYTES = 2_200_000_000
"""Memory of the store's engine for a report; the rest goes to disk. The analyzers take up to 1 GB more."""
HISTORY_ROWS = 1_000_000
"""Rows of the ranks that are kept whole."""
BEGIN_STEPS, END_STEPS = 20, 60
"""Steps of an attempt that are picked at its begin and its end; fewer where there are many attempts."""
MAX_END_STEPS = 320
_Stretches = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """A run as analyzers read it. `looked_at`: for the report, how much was compared; empty where all was."""

    whole: Source
    compared: Source
    sampled: Source
    histories: Source
    looked_at: Mapping[str, int] = field(default_factory=dict)


def whole_views(source: Source) -> Views:
    """The run itself in every view."""
    return Views(whole=source, compared=source, sampled=source, histories=source)


def reduced_views(source: Source, max_rows: int = MAX_ROWS) -> Views:
    """The views of a run; nothing is copied of one that has at most `max_rows` rows of steps. Raises StoreError."""
    if not isinstance(source, Store) or not source.has("steps"):
        return whole_views(source)
    ((num_rows,),) = source.rows("SELECT count(*) FROM steps")
    if num_rows <= max_rows:
        return whole_views(source)
    ranks = source.rows(
        "SELECT attempt, rank, count(*), count(loss), min(step), max(step) FROM steps WHERE rank >= 0 "
        "GROUP BY attempt, rank ORDER BY attempt, rank"
    )
    if len({rank for _, rank, *_ in ranks}) < 2:
        return whole_views(source)
    first, last = min(row[4] for row in ranks), max(row[5] for row in ranks)
    kept_whole = ", ".join(map(str, _whole_ranks(ranks)))
    histories = source.session(steps=f"SELECT * FROM steps WHERE rank IN ({kept_whole})")
    chosen = choose(source, (first, last), max(row[1] for row in ranks) + 1)
    ends = _ends(histories, len({attempt for attempt, *_ in ranks}))
    even = [(first, last, chosen.every)]
    compared = source.session(steps=_picked([*chosen.stretches, *ends]))
    sampled = compared.session(steps=_picked([*even, *ends]))
    num_compared = len(set().union(*(range(low, high + 1, every) for low, high, every in [*chosen.stretches, *ends])))
    return Views(
        whole=source,
        compared=compared,
        sampled=sampled,
        histories=histories,
        looked_at={"of": last - first + 1, "steps": num_compared, "shortest_slowdown_steps": 2 * chosen.block},
    )


def _whole_ranks(ranks: Sequence[tuple[int, ...]]) -> list[int]:
    """Ranks whose steps are all kept: each attempt's first with a loss, the longest, others at even distances.

    `ranks`: rows of (attempt, rank, number of rows, number of losses, ...).
    """
    total = {rank: 0 for _, rank, *_ in ranks}
    for _, rank, num_rows, *_ in ranks:
        total[rank] += num_rows
    with_loss: dict[int, int] = {}
    for attempt, rank, _, num_losses, *_ in ranks:
        if num_losses:
            with_loss.setdefault(attempt, rank)
    every = max(1, -(-sum(total.values()) // HISTORY_ROWS))
    longest = min(total, key=lambda rank: (-total[rank], rank))
    return sorted({longest, *with_loss.values(), *(rank for rank in total if rank % every == 0)})


def _ends(histories: Source, num_attempts: int) -> list[tuple[int, int, int]]:
    """The steps that ran first and last in each attempt, by the clock of its lowest rank that is kept whole."""
    share = min(1.0, MAX_END_STEPS / (num_attempts * (BEGIN_STEPS + END_STEPS)))
    steps = histories.rows(
        """
        SELECT DISTINCT step FROM (
            SELECT step, row_number() OVER (PARTITION BY attempt ORDER BY start_ns) AS place,
                   row_number() OVER (PARTITION BY attempt ORDER BY start_ns DESC) AS from_end
            FROM steps WHERE (attempt, rank) IN (SELECT (attempt, min(rank)) FROM steps GROUP BY attempt))
        WHERE place <= ? OR from_end <= ? ORDER BY step
        """,
        [max(1, int(share * BEGIN_STEPS)), max(2, int(share * END_STEPS))],
    )
    runs = groupby(enumerate(step for (step,) in steps), key=lambda pair: pair[1] - pair[0])
    members = [[step for _, step in run] for _, run in runs]
    return [(run[0], run[-1], 1) for run in members]


def _picked(stretches: _Stretches) -> str:
    """SQL of the rows in these stretches of steps, and of steps that never ended."""
    return f"SELECT * FROM steps WHERE duration_ns IS NULL OR step IN ({_steps_of(stretches)})"


def _steps_of(stretches: _Stretches) -> str:
    """The steps of stretches as a list for SQL: read twice as fast as a join with a table of them."""
    steps = set().union(*(range(low, high + 1, every) for low, high, every in stretches))
    return ", ".join(map(str, sorted(steps)))
