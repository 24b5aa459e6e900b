"""Committed and discarded executions of steps, and the time each rank spent in both.

    for (attempt, rank), spent in step_times(source).items():
        spent.kept.duration_ns, spent.discarded_ns, spent.first_ns, spent.last_ns

A step runs again with the same number after a rollback or a restart, which discards its earlier execution. An execution
is *kept* if its optimizer step was taken and its rank never went back to this step or an earlier one. If a loop doesn't
record whether it took the optimizer step, it counts as taken. Steps of an attached loop before a restart that does not
say where it resumed may be kept or discarded: they are summed in `kept`, and `num_open` counts them (`step_numbers`).

The rank with the most steps shows where the run went back. Only those ranges are sorted for every rank. The rest is
summed unsorted, and from a very long run only every k-th step is read and weighted by k.
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

__all__ = ["RankTimes", "step_times", "went_back"]

MAX_ROWS = 40_000_000
"""Rows of steps up to which all are summed; above, every k-th step is read."""
_MAX_RANGES = 50
"""Ranges of steps that were run again, for SQL; neighbours are merged if there are more."""
_AHEAD = 2
"""Steps by which other ranks may have been ahead of the rank whose sequence is read."""


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """One rank in one attempt; times are epoch nanoseconds by its own clock. Unfinished steps are not in the sums."""

    first_ns: int = 0
    last_ns: int = 0
    """End of the last finished step, or `first_ns`."""
    open_ns: int | None = None
    """Start of the last step, if it was never finished."""
    kept: StepSums = field(default_factory=StepSums)
    discarded_ns: int = 0
    num_discarded: int = 0
    num_open: int = 0
    """Number of kept steps that a restart may have discarded."""


def step_times(
    source: Source, views: Views | None = None, standstill_ns: Mapping[int, int] | None = None
) -> dict[tuple[int, int], RankTimes]:
    """{(attempt, rank): times}, in order; empty without steps.

    `standstill_ns`: by attempt, the start of a standstill that lasted until its end. A step that ended later than that
    was interrupted, not finished.
    """
    standstill_ns = standstill_ns or {}
    finished = before_standstill(standstill_ns)
    views = views or whole_views(source)
    numbers = step_numbers(source)
    repeated = _ranges(went_back(views.histories, numbers))
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
        place = times.setdefault((attempt, rank), RankTimes(first_ns=first_ns, last_ns=last_ns))
        place.first_ns, place.last_ns = min(place.first_ns, first_ns), max(place.last_ns, last_ns)
        if kept:
            place.kept = StepSums.of_row(sums)
            place.num_open = place.kept.num_steps if numbers.is_open(attempt) else 0
        else:
            discarded = StepSums.of_row(sums)
            place.num_discarded, place.discarded_ns = discarded.num_steps, discarded.duration_ns
    for attempt, rank, start_ns in views.sampled.rows(
        "SELECT attempt, rank, max(start_ns) FROM steps "
        f"WHERE NOT ({finished}) AND start_ns IS NOT NULL AND rank >= 0 GROUP BY ALL"
    ):
        place = times.setdefault((attempt, rank), RankTimes(first_ns=start_ns, last_ns=start_ns))
        if start_ns >= place.last_ns:  # a step aborted by an exception may be followed by finished ones
            place.open_ns = start_ns
    return dict(sorted(times.items()))


def went_back(source: Source, numbers: StepNumbers | None = None) -> tuple[Ints, Ints]:
    """Two arrays: steps whose execution was discarded, and the earliest step that the run went back to after each."""
    numbers = numbers or StepNumbers()
    table = source.query(
        f"""
        SELECT {numbers.step} AS step, {numbers.line} AS line, coalesce(committed, true) AS committed FROM steps
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
    for line in np.unique(ints(table["line"])):
        rows = np.flatnonzero(ints(table["line"]) == line)
        later[rows[:-1]] = np.minimum.accumulate(step[rows][::-1])[::-1][1:]
    discarded: npt.NDArray[np.bool_] = ~committed | (step >= later)
    return step[discarded], np.minimum(step, later)[discarded]


def _ranges(back: tuple[Ints, Ints]) -> list[tuple[int, int]]:
    """Ranges of steps that cover every discarded step and the step that the run went back to."""
    found: list[tuple[int, int]] = []
    for last, first in sorted(zip(back[0].tolist(), back[1].tolist(), strict=True), key=lambda pair: pair[1]):
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
        f"min({number}) OVER (PARTITION BY rank, {numbers.line} ORDER BY attempt, start_ns "
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
    """Attempts that are not named are of line 0 and count their steps from the first attempt on.

    Hooks count an attached loop's steps from 1 in every process. Only its optimizer tells where a restart went on: its
    state counts the updates before (event `first_update`). A restart whose optimizer does not say may have loaded all,
    a part or nothing: it begins a new line of attempts, and of the steps of the lines before it is not known whether
    they were kept. The trainer's own steps keep their number over restarts: one line.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    """By attempt: updates before its first step."""
    lines: Mapping[int, int] = field(default_factory=dict)

    @property
    def step(self) -> str:
        """SQL: the step's number within its line."""
        return f"(step + {_case(self.offsets)})" if any(self.offsets.values()) else "step"

    @property
    def line(self) -> str:
        """SQL: the step's line."""
        return _case(self.lines) if any(self.lines.values()) else "0"

    def is_open(self, attempt: int) -> bool:
        """True if a later line of attempts began, so that it is not known what of this attempt was kept."""
        return self.lines.get(attempt, 0) < max(self.lines.values(), default=0)


def step_numbers(source: Source) -> StepNumbers:
    """The numbers by the events of a run."""
    if not source.has("events"):
        return StepNumbers()
    table = source.query(
        "SELECT attempt, coalesce(min(CAST(json_extract_string(detail, '$.num_before') AS BIGINT)), -1) AS num_before "
        f"FROM events WHERE kind = '{event_kinds.FIRST_UPDATE}' GROUP BY attempt ORDER BY attempt"
    )
    offsets: dict[int, int] = {}
    lines: dict[int, int] = {}
    line = 0
    for attempt, before in zip(ints(table["attempt"]).tolist(), ints(table["num_before"]).tolist(), strict=True):
        if attempt > 0 and before <= 0:
            line += 1
        offsets[attempt], lines[attempt] = max(0, before), line
    return StepNumbers(offsets=offsets, lines=lines)


def _case(values: Mapping[int, int]) -> str:
    whens = " ".join(f"WHEN {attempt} THEN {value}" for attempt, value in values.items() if value)
    return f"CASE attempt {whens} ELSE 0 END"
