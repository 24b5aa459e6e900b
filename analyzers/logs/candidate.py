"""A possible cause named by log lines: what it is, which rank or host it belongs to, and whether it is proven.

from_lines("link_down", lines, rank_class="network", what="The network link ib0 of gpu-01 went down")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from analyzers.causes import COLLECT
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.wording import ranks_text

__all__ = ["PRECEDENCE", "Candidate", "from_lines", "host_in", "named_by", "ranks_of", "who"]

PRECEDENCE = ("host", "error", "mismatch", "death", "hang", "network", "numerics", "weak", "victim")
"""host: the kernel or the scheduler names the cause. error: a process names its own error. weak: the lines may be
unrelated to the job's end. The first class with a candidate decides the verdict; within a class, the earliest line."""
_KINDS = {"mismatch": "hang", "hang": "hang", "numerics": "non_finite"}
"""Kind of finding by class; `rank_lost` for all other classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cause. `is_proven`: a line states it; otherwise it is suspected, and the output of `collect` would decide."""

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


def from_lines(
    cause: str,
    lines: Sequence[LogLine],
    *,
    rank_class: str,
    what: str,
    ranks: Sequence[int] = (),
    kind: str = "",
    why: str = "",
    is_proven: bool = True,
    severity: str = "critical",
    evidence: Mapping[str, Any] = MappingProxyType({}),
    collect: tuple[str, ...] | None = None,
) -> Candidate:
    """Make a candidate from lines. Defaults: `why` quotes the first line, `kind` follows from `rank_class`, and
    `collect` follows from the cause (for a hang, from the kind).
    """
    kind = kind or _KINDS.get(rank_class, "rank_lost")
    if collect is None:
        collect = COLLECT["hang"] if kind == "hang" else COLLECT.get(cause, ())
    return Candidate(
        cause=cause, kind=kind, rank_class=rank_class, ranks=tuple(ranks), what=what, why=why or lines[0].quoted,
        lines=tuple(lines), is_proven=is_proven, severity=severity, evidence=evidence, collect=collect,
    )  # fmt: skip


def ranks_of(lines: Iterable[LogLine]) -> tuple[int, ...]:
    """Ranks that printed the lines."""
    return tuple(sorted({entry.rank for entry in lines if entry.rank is not None}))


def named_by(lines: Iterable[LogLine]) -> tuple[int, ...]:
    """Ranks that the lines list."""
    return tuple(sorted({rank for entry in lines for rank in entry.ranks()}))


def host_in(lines: Iterable[LogLine]) -> str | None:
    """The host of the first line that has one."""
    return next((entry.host for entry in lines if entry.host), None)


def who(ranks: Sequence[int], otherwise: str = "a rank that the log does not name") -> str:
    """Start of a sentence: `Rank 3`, `Ranks 1 and 2`, or `otherwise` if no rank is known."""
    text = ranks_text(sorted(ranks)) if ranks else otherwise
    return text[:1].upper() + text[1:]
