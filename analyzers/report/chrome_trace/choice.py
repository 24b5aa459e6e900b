"""Choose the part of a run that a trace holds, and the pieces in which the records of this part are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from analyzers.figures.course import StoryEvent
from analyzers.source import Source

__all__ = ["CHUNK_ROWS", "TraceChoice", "row_parts"]

CHUNK_ROWS = 20_000
"""Records read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """Part of the run that the trace holds. None or empty fields mean everything."""

    steps: tuple[int, int] | None = None
    attempt: int | None = None
    ranks: frozenset[int] = frozenset()

    @property
    def rank_condition(self) -> str:
        """SQL condition for the chosen ranks."""
        listed = ", ".join(str(int(rank)) for rank in sorted(self.ranks))
        return f"rank IN ({listed})" if listed else "rank >= 0"

    @property
    def condition(self) -> str:
        """SQL condition for the whole choice."""
        parts = [self.rank_condition]
        if self.steps is not None:
            parts.append(f"step BETWEEN {int(self.steps[0])} AND {int(self.steps[1])}")
        if self.attempt is not None:
            parts.append(f"attempt = {int(self.attempt)}")
        return " AND ".join(parts)

    @property
    def with_all_ranks(self) -> TraceChoice:
        """Return a choice with the same steps and attempt of every rank."""
        return replace(self, ranks=frozenset())

    def contains(self, event: StoryEvent) -> bool:
        """True if an event belongs to the choice; a choice of ranks does not exclude events of node processes."""
        return (
            (self.steps is None or event.step is None or self.steps[0] <= event.step <= self.steps[1])
            and self.attempt in (None, event.attempt)
            and (not self.ranks or event.rank < 0 or event.rank in self.ranks)
        )

    def window(self, source: Source) -> tuple[int, int] | None:
        """Start and end of the chosen steps of all ranks, in epoch nanoseconds; None if no steps were chosen."""
        if self.steps is None or not source.has("steps"):
            return None
        ((begin_ns, end_ns, is_open),) = source.rows(
            "SELECT min(start_ns), max(start_ns + coalesce(duration_ns, 0)), bool_or(duration_ns IS NULL) FROM steps "
            f"WHERE start_ns > 0 AND {self.with_all_ranks.condition}"
        )
        return None if begin_ns is None else (begin_ns, 1 << 62 if is_open else end_ns)


def row_parts(source: Source, table: str, choice: TraceChoice) -> Iterator[tuple[int, str]]:
    """Yield (attempt, SQL condition) for pieces of about `CHUNK_ROWS` records: ranges of steps, and the records without
    a step."""
    for attempt, num_rows, first, last in source.rows(
        f"SELECT attempt, count(*), min(step), max(step) FROM {table} WHERE {choice.condition} GROUP BY 1 ORDER BY 1"
    ):
        if choice.steps is None:
            yield attempt, "step IS NULL"
        if first is None:
            continue
        length = max(1, (last - first + 1) * CHUNK_ROWS // max(1, num_rows))
        for begin in range(first, last + 1, length):
            yield attempt, f"step BETWEEN {begin} AND {min(last, begin + length - 1)}"
