"""Committed and discarded executions of steps, and the time each rank spent in both.

    for (attempt, rank), times in step_times(source).items():
        times.kept.duration_ns, times.discarded_ns, times.first_ns, times.last_ns

A step that runs again after a rollback or a restart has the same number as before, and its earlier execution is
discarded. An execution is *kept* if its optimizer step was taken and its rank never returned to this step or an earlier
one. If a loop doesn't record whether it took the optimizer step, the step counts as taken. If it is unknown where a
restart of an attached loop resumed, the steps before the restart may be kept or discarded: `kept` sums them, and
`num_unconfirmed` counts them.

The rank with the most steps shows which ranges of steps were repeated. Only these ranges are sorted for every rank. All
other steps are summed unsorted; in a very long run only every k-th of them is read, with weight k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from analyzers.account.long_run import Views, whole_views
from analyzers.account.time_classes import StepSums, sums_sql
from analyzers.run.records.standstills import before_standstill
from analyzers.source import Ints, Source, ints
from probes.tape import event_kinds

__all__ = ["RankTimes", "discarded_steps", "step_times"]

MAX_ROWS = 40_000_000
"""With more rows of steps than this, only every k-th step is read."""
_MAX_RANGES = 50
"""Maximum ranges of repeated steps in a query; neighbours are merged if there are more."""
_AHEAD = 2
"""Other ranks may be this many steps ahead of the rank from which the sequence of steps is read."""


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """One rank in one attempt; times are epoch nanoseconds by the rank's clock. Unfinished steps are not in the
    sums."""

    first_ns: int = 0
    last_ns: int = 0
    """End of the last finished step, or `first_ns`."""
    open_ns: int | None = None
    """Start of the last step, if it was never finished."""
    kept: StepSums = field(default_factory=StepSums)
    discarded_ns: int = 0
    num_discarded: int = 0
    num_unconfirmed: int = 0
    """Number of kept steps that a restart may have discarded."""


def step_times(
    source: Source, views: Views | None = None, standstill_ns: Mapping[int, int] | None = None
) -> dict[tuple[int, int], RankTimes]:
    """{(attempt, rank): times}, in order; empty without steps.

    `standstill_ns`: {attempt: start of the standstill that lasted until the attempt ended}. A step that ended after
    this start was interrupted, not finished.
    """
    standstill_ns = standstill_ns or {}
    finished = before_standstill(standstill_ns)
    views = views or whole_views(source)
    numbers = step_numbers(source)
    repeated = _ranges(*discarded_steps(views.histories, numbers))
    ((num_rows,),) = source.rows("SELECT count(*) FROM steps")
    stride = max(1, -(-num_rows // MAX_ROWS))
    times: dict[tuple[int, int], RankTimes] = {}
    if stride > 1:  # sampling must not move the first start and the last end
        for attempt, rank, first_ns, last_ns in views.sampled.rows(
            "SELECT attempt, rank, min(start_ns), max(start_ns + duration_ns) FROM steps "
            f"WHERE {finished} AND start_ns IS NOT NULL AND rank >= 0 GROUP BY attempt, rank"
        ):
            times[attempt, rank] = RankTimes(first_ns=first_ns, last_ns=last_ns)
    for attempt, rank, kept, first_ns, last_ns, *sums in source.rows(*_sums(repeated, stride, finished, numbers)):
        one = times.setdefault((attempt, rank), RankTimes(first_ns=first_ns, last_ns=last_ns))
        one.first_ns, one.last_ns = min(one.first_ns, first_ns), max(one.last_ns, last_ns)
        if kept:
            one.kept = StepSums.of_row(sums)
            one.num_unconfirmed = one.kept.num_steps if numbers.is_unconfirmed(attempt) else 0
        else:
            discarded = StepSums.of_row(sums)
            one.num_discarded, one.discarded_ns = discarded.num_steps, discarded.duration_ns
    for attempt, rank, start_ns in views.sampled.rows(
        "SELECT attempt, rank, max(start_ns) FROM steps "
        f"WHERE NOT ({finished}) AND start_ns IS NOT NULL AND rank >= 0 GROUP BY ALL"
    ):
        one = times.setdefault((attempt, rank), RankTimes(first_ns=start_ns, last_ns=start_ns))
        if start_ns >= one.last_ns:  # not if an exception aborted the step and the loop then finished other steps
            one.open_ns = start_ns
    return dict(sorted(times.items()))


def discarded_steps(source: Source, numbers: StepNumbers | None = None) -> tuple[Ints, Ints]:
    """Two arrays: the steps of discarded executions, and for each the earliest step to which the run returned later."""
    numbers = numbers or StepNumbers()
    table = source.query(
        f"""
        SELECT {numbers.step} AS step, {numbers.lineage} AS lineage, coalesce(committed, true) AS committed FROM steps
        WHERE duration_ns IS NOT NULL AND rank = (
            SELECT rank FROM steps WHERE rank >= 0 AND duration_ns IS NOT NULL
            GROUP BY rank ORDER BY count(*) DESC, rank LIMIT 1)
        ORDER BY attempt, start_ns
        """
    )
    step, committed = ints(table["step"]), table["committed"].astype(bool)
    if not len(step):
        return step, step
    later = np.full(len(step), np.iinfo(np.int64).max, dtype=np.int64)
    for lineage in np.unique(ints(table["lineage"])):
        rows = np.flatnonzero(ints(table["lineage"]) == lineage)
        later[rows[:-1]] = np.minimum.accumulate(step[rows][::-1])[::-1][1:]
    discarded: npt.NDArray[np.bool_] = ~committed | (step >= later)
    return step[discarded], np.minimum(step, later)[discarded]


def _ranges(discarded: Ints, returned_to: Ints) -> list[tuple[int, int]]:
    """Ranges of steps that cover every discarded step and the step to which the run returned."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(zip(returned_to.tolist(), discarded.tolist(), strict=True)):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last + _AHEAD))
        else:
            found.append((first, last + _AHEAD))
    while len(found) > _MAX_RANGES:
        found = [(found[i][0], found[min(i + 1, len(found) - 1)][1]) for i in range(0, len(found), 2)]
    return found


def _sums(repeated: list[tuple[int, int]], stride: int, finished: str, numbers: StepNumbers) -> tuple[str, list[int]]:
    """Query for the sums, and its parameters. Only steps in the `repeated` ranges need their order."""
    finished = f"{finished} AND start_ns IS NOT NULL AND rank >= 0"
    number = numbers.step
    in_repeated = " OR ".join(f"{number} BETWEEN ? AND ?" for _ in repeated) or "false"
    later = (
        f"min({number}) OVER (PARTITION BY rank, {numbers.lineage} ORDER BY attempt, start_ns "
        "ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)"
    )
    rows = f"""
        SELECT *, coalesce(committed, true) AS kept, {stride} AS weight
        FROM steps WHERE {finished} AND NOT ({in_repeated}) AND step % {stride} = 0
        UNION ALL BY NAME
        SELECT *, coalesce(committed, true) AND {number} < coalesce({later}, {number} + 1) AS kept, 1 AS weight
        FROM steps WHERE {finished} AND ({in_repeated})"""
    more = (("min", "start_ns"), ("max", "start_ns + duration_ns"))
    sql = sums_sql(rows, "attempt, rank, kept", more=more, weight="weight")
    bounds = [bound for pair in repeated for bound in pair]
    return sql, bounds + bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Step numbers that continue over the restarts of a run.

    The hooks count an attached loop's steps from 1 in every process. Only the optimizer shows at which step a restart
    resumed: its state counts the earlier updates (event `first_update`). If that state is not known, the restart may
    have loaded everything, a part or nothing: it starts a new *lineage* of attempts, and it is not known whether the
    steps of earlier lineages were kept. The trainer's steps keep their numbers over restarts, so they have one lineage.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    """Updates before the first step, by attempt; 0 if missing."""
    lineages: Mapping[int, int] = field(default_factory=dict)
    """Lineage by attempt; 0 if missing."""

    @property
    def step(self) -> str:
        """SQL of the step's number within its lineage."""
        return f"(step + {_case(self.offsets)})" if any(self.offsets.values()) else "step"

    @property
    def lineage(self) -> str:
        """SQL of the step's lineage."""
        return _case(self.lineages) if any(self.lineages.values()) else "0"

    def is_unconfirmed(self, attempt: int) -> bool:
        """True if a later lineage exists, so that it is not known which steps of this attempt were kept."""
        return self.lineages.get(attempt, 0) < max(self.lineages.values(), default=0)


def step_numbers(source: Source) -> StepNumbers:
    """Read the step numbers from the events of a run."""
    if not source.has("events"):
        return StepNumbers()
    table = source.query(
        "SELECT attempt, coalesce(min(CAST(json_extract_string(detail, '$.num_before') AS BIGINT)), -1) AS num_before "
        f"FROM events WHERE kind = '{event_kinds.FIRST_UPDATE}' GROUP BY attempt ORDER BY attempt"
    )
    offsets: dict[int, int] = {}
    lineages: dict[int, int] = {}
    lineage = 0
    for attempt, before in zip(ints(table["attempt"]).tolist(), ints(table["num_before"]).tolist(), strict=True):
        if attempt > 0 and before <= 0:
            lineage += 1
        offsets[attempt], lineages[attempt] = max(0, before), lineage
    return StepNumbers(offsets=offsets, lineages=lineages)


def _case(values: Mapping[int, int]) -> str:
    whens = " ".join(f"WHEN {attempt} THEN {value}" for attempt, value in values.items() if value)
    return f"CASE attempt {whens} ELSE 0 END"
