"""Times of a trace: microseconds since the first record of the run, and when each attempt began and ended."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.source import Source

__all__ = ["TraceClock", "attempt_times"]

_TIMED = {
    "steps": ("start_ns", "start_ns + duration_ns"),
    "spans": ("start_ns", "end_ns"),
    "collectives": ("issue_ns", "end_ns"),
}
_MOMENTS = {"ranks": "wall_ns", "events": "wall_ns", "health": "sample_ns"}


@dataclass(frozen=True, slots=True)
class TraceClock:
    """Converts epoch nanoseconds into microseconds of the trace."""

    zero_ns: int

    @classmethod
    def of(cls, source: Source) -> TraceClock:
        """Make the clock; zero is the earliest recorded time, so that no time in the trace is negative."""
        begins = {table: begin for table, (begin, _) in _TIMED.items()} | _MOMENTS
        times = [
            source.rows(f"SELECT min({column}) FROM {table} WHERE {column} > 0")[0][0]
            for table, column in begins.items()
            if source.has(table)
        ]
        return cls(min((time for time in times if time), default=0))

    def us(self, wall_ns: int) -> float:
        """The time in microseconds since the first record of the trace."""
        return (wall_ns - self.zero_ns) / 1e3


def attempt_times(source: Source) -> dict[int, tuple[int, int]]:
    """{attempt: times of the first and the last record that any of its ranks made, in epoch nanoseconds}."""
    found: dict[int, tuple[int, int]] = {}
    for table, (begin, end) in _TIMED.items():
        if not source.has(table):
            continue
        for attempt, first_ns, last_ns in source.rows(
            f"SELECT attempt, min({begin}), max(greatest({begin}, coalesce({end}, {begin}))) FROM {table} "
            f"WHERE {begin} > 0 AND rank >= 0 GROUP BY 1"
        ):
            known = found.get(attempt, (first_ns, last_ns))
            found[attempt] = (min(known[0], first_ns), max(known[1], last_ns))
    return dict(sorted(found.items()))
