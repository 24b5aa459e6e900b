"""Result of reading one log: events, steps, and what was left out.

log = ReadLog(path=path, rank=3)
log.events[0].kind, log.events[0].rank, log.events[0].fields
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.logs.prefix import Prefix
from store.readers.logs.step_lines import StepLine

__all__ = ["LogEvent", "LogStep", "ReadLog"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """A line that matches a rule. `rank` and `wall_ns` (epoch nanoseconds) are None if the line does not state them."""

    kind: str
    role: str
    cause: str
    line: int
    prefix: Prefix
    message: str
    fields: dict[str, Any]

    @property
    def rank(self) -> int | None:
        return self.prefix.rank

    @property
    def wall_ns(self) -> int | None:
        return self.prefix.wall_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStep:
    """A step that a line reports, and the line's prefix."""

    prefix: Prefix
    step_line: StepLine


@dataclass(slots=True, kw_only=True)
class ReadLog:
    """One file's events and steps. `rank`: from its name. `problem`: why it was not read completely."""

    path: Path
    rank: int | None
    events: list[LogEvent] = field(default_factory=list)
    steps: list[LogStep] = field(default_factory=list)
    printed: set[int] = field(default_factory=set)
    """Ranks of lines with steps, and of lines at the file's start and end."""
    tasks: set[int] = field(default_factory=set)
    """srun's task labels at the file's start and end."""
    first_step_line: int = 0
    last_step_line: int = 0
    num_lines: int = 0
    num_bytes: int = 0
    tail: bytes = b""
    """Last bytes of the file."""
    given_up: list[str] = field(default_factory=list)
    """What was not read because of a limit."""
    year: int = 0
    """Year assumed for times that lack a year."""
    years: set[int | None] = field(default_factory=set)
    """Years in the file's times; contains None if some times have no year."""
    problem: str = ""
    unjudged: str = ""
    """Question that a file without a failure leaves open. Empty for a text log, because its last lines show how far the
    job got.
    """
    is_compared: bool = False
    """True if part of what `unjudged` names was checked."""
