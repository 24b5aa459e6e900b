"""Steps of an attached loop over its restarts: which attempts can be compared by number.

    numbers = step_numbers(source)
    numbers.step, numbers.line             # SQL of table `steps`: the number over restarts, and the line of attempts
    numbers.is_open(attempt)               # True: whether its steps were kept is not known

Hooks count an attached loop's steps from 1 in every process. Only its optimizer tells where a restart went on: its
state counts the updates before (event `first_update`). A restart whose optimizer does not say may have loaded all, a
part or nothing: it begins a new line of attempts, and of the steps of the lines before it is not known whether they
were kept. The trainer's own steps keep their number over restarts: one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from analyzers.source import Source, ints
from probes.tape import event_kinds

__all__ = ["StepNumbers", "step_numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Attempts that are not named are of line 0 and count their steps from the first attempt on."""

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
