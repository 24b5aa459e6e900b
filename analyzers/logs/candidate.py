"""A possible cause that lines of a log name: what it is, whose, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analyzers.logs.log_events import LogBook, LogLine
from analyzers.wording import ranks_text

__all__ = ["PRECEDENCE", "Candidate", "who"]

PRECEDENCE = ("host", "own", "mismatch", "death", "hang", "network", "numerics", "late", "victim")
"""host: kernel or scheduler. own: a process names its own cause. late: an error that is no proof, because of when it
came. The first class that has a candidate is the verdict's; within a class the earliest line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cause. `is_proven`: a line states it; otherwise it is suspected, and `collect` would settle it."""

    cause: str
    kind: str
    rank_class: str
    ranks: tuple[int, ...]
    what: str
    why: str
    lines: tuple[LogLine, ...]
    is_proven: bool = True
    severity: str = "critical"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    collect: tuple[str, ...] = ()

    def order(self, book: LogBook) -> tuple[int, bool, int]:
        """Order of candidates: class, proof, time."""
        first = min((book.position(entry) for entry in self.lines), default=len(book.lines))
        return (PRECEDENCE.index(self.rank_class), not self.is_proven, first)


def who(ranks: Sequence[int], otherwise: str = "a rank that the log does not name") -> str:
    """Begin a sentence: `Rank 3`, `Ranks 1 and 2`, or `otherwise` where no rank is known."""
    text = ranks_text(sorted(ranks)) if ranks else otherwise
    return text[:1].upper() + text[1:]
