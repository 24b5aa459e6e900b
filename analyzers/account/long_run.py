"""Reduced views of runs with hundreds of millions of step rows, small enough to query many times.

    views = reduced_views(source)                   # up to `MAX_ROWS` step rows, each view is the source itself
    views.compared.rows("SELECT ... FROM steps")    # all ranks, in the steps where a rank changes against the others
    views.sampled.rows("SELECT ... FROM steps")     # all ranks, in evenly spaced steps and the ends of each attempt
    views.histories.rows("SELECT ... FROM steps")   # all steps of some ranks

A query over 400 million rows takes seconds, and analyzers run about sixty queries. In this way all rows are read only
four times. The selected rows are opened as sessions of the store (`Store.session`), whose `steps` has no other rows:

1. A query counts the steps and the losses of each rank in each attempt.
2. The full history of some ranks is selected. It serves records of a single rank (losses, rollbacks) and events that
   recur every n steps (evaluations, checkpoints).
3. `downsampling` finds the steps where a rank changes against the others.
4. These steps are selected for all ranks, with the first and last steps of each attempt and every unfinished step. The
   start and end of each rank's records are exact. Medians and shares come from evenly spaced steps.

Sums over all steps (goodput, tokens) and single rows (a value that is not finite) are queried from the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from analyzers.account.downsampling import choose
from analyzers.source import Source
from store import Store

__all__ = ["MAX_ROWS", "MEMORY_BYTES", "Views", "reduced_views", "whole_views"]

MAX_ROWS = 10_000_000
MEMORY_BYTES = 2_200_000_000
"""DuckDB's memory limit for a report; it spills to disk beyond that. The analyzers take up to 1 GB more."""
HISTORY_ROWS = 1_000_000
"""Approximate limit on rows in `Views.histories`."""
FIRST_STEPS, LAST_STEPS = 20, 60
"""Steps selected at the start and the end of each attempt; fewer if there are many attempts."""
MAX_END_STEPS = 320
"""Limit on the first and last steps of all attempts together."""
_Ranges = Sequence[tuple[int, int, int]]
"""Ranges of steps: (first, last, stride)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """A run as analyzers read it. `coverage`: how much was compared, for the report; empty if everything was."""

    whole: Source
    compared: Source
    sampled: Source
    histories: Source
    coverage: Mapping[str, int] = field(default_factory=dict)


def whole_views(source: Source) -> Views:
    """The run itself in every view."""
    return Views(whole=source, compared=source, sampled=source, histories=source)


def reduced_views(source: Source, max_rows: int = MAX_ROWS) -> Views:
    """The views of a run. With at most `max_rows` rows of steps nothing is copied. Raises StoreError."""
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
    history_ranks = ", ".join(map(str, _history_ranks(ranks)))
    histories = source.session(steps=f"SELECT * FROM steps WHERE rank IN ({history_ranks})")
    chosen = choose(source, (first, last), max(row[1] for row in ranks) + 1)
    ends = _ends(histories, len({attempt for attempt, *_ in ranks}))
    compared_steps = _steps_in([*chosen.ranges, *ends])
    compared = source.session(steps=_rows_of(compared_steps))
    sampled = compared.session(steps=_rows_of(_steps_in([(first, last, chosen.stride), *ends])))
    return Views(
        whole=source,
        compared=compared,
        sampled=sampled,
        histories=histories,
        coverage={"of": last - first + 1, "steps": len(compared_steps), "shortest_slowdown_steps": 2 * chosen.block},
    )


def _history_ranks(ranks: Sequence[tuple[int, ...]]) -> list[int]:
    """Ranks with full histories: the first rank with a loss in each attempt, the rank with the most steps, and others,
    evenly spaced.

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
    """The steps that ran first and last in each attempt, on its lowest rank in `histories`."""
    share = min(1.0, MAX_END_STEPS / (num_attempts * (FIRST_STEPS + LAST_STEPS)))
    steps = histories.rows(
        """
        SELECT DISTINCT step FROM (
            SELECT step, row_number() OVER (PARTITION BY attempt ORDER BY start_ns) AS place,
                   row_number() OVER (PARTITION BY attempt ORDER BY start_ns DESC) AS from_end
            FROM steps WHERE (attempt, rank) IN (SELECT (attempt, min(rank)) FROM steps GROUP BY attempt))
        WHERE place <= ? OR from_end <= ? ORDER BY step
        """,
        [max(1, int(share * FIRST_STEPS)), max(2, int(share * LAST_STEPS))],
    )
    runs = groupby(enumerate(step for (step,) in steps), key=lambda pair: pair[1] - pair[0])
    members = [[step for _, step in run] for _, run in runs]
    return [(run[0], run[-1], 1) for run in members]


def _steps_in(ranges: _Ranges) -> set[int]:
    return set().union(*(range(first, last + 1, stride) for first, last, stride in ranges))


def _rows_of(steps: set[int]) -> str:
    """SQL for the rows of these steps and of unfinished ones; a list is twice as fast as a join with a table."""
    return f"SELECT * FROM steps WHERE duration_ns IS NULL OR step IN ({', '.join(map(str, sorted(steps)))})"
