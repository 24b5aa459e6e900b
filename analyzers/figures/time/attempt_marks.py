"""Marks on a timeline: start and end of attempts, and rollbacks to an earlier step.

attempt_marks(store, attempt=1)[0].text         # "attempt 1 begins"
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["AttemptMark", "attempt_marks"]

_TIMED = (
    ("steps", "start_ns", "start_ns + duration_ns"),
    ("spans", "start_ns", "end_ns"),
    ("collectives", "issue_ns", "end_ns"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMark:
    """Something that happened to an attempt. `wall_ns`: by the clock of the host of `rank`; -1: of any host."""

    wall_ns: int
    text: str
    rank: int = -1


def attempt_marks(source: Source, attempt: int) -> list[AttemptMark]:
    """Marks in order of time. An attempt has ended if another one began or the run ended."""
    if not source.has("steps"):
        return []
    of = "FROM steps WHERE attempt = ? AND rank >= 0"
    ((begin_ns, last_step),) = source.rows(  # ORDER BY ... LIMIT 1 lets DuckDB skip blocks of rows; min and max do not
        f"SELECT (SELECT start_ns {of} ORDER BY start_ns LIMIT 1), (SELECT step {of} ORDER BY step DESC LIMIT 1)",
        [attempt, attempt],
    )
    if begin_ns is None:
        return []
    ((is_followed,),) = source.rows("SELECT count(*) > 0 FROM steps WHERE rank >= 0 AND attempt > ?", [attempt])
    log = EventLog.load(source, (event_kinds.ROLLBACK, event_kinds.RUN_ENDED))
    found = [AttemptMark(wall_ns=begin_ns, text=f"attempt {attempt} begins")]
    found += [
        AttemptMark(
            wall_ns=event.wall_ns, rank=event.rank,
            text=f"rollback: step {event.integer('from_step')} to {event.integer('to_step')}",
        )
        for event in log.of(event_kinds.ROLLBACK, attempt=attempt)
    ]  # fmt: skip
    has_ended = is_followed or any(event.wall_ns >= begin_ns for event in log.of(event_kinds.RUN_ENDED))
    if has_ended:
        found.append(AttemptMark(wall_ns=_last_record_ns(source, attempt, last_step), text=f"attempt {attempt} ends"))
    return sorted(found, key=lambda mark: mark.wall_ns)


def _last_record_ns(source: Source, attempt: int, last_step: int) -> int:
    """Latest time in the last step's records of all ranks: steps, spans and calls. Records without an end count with
    their start."""
    times = [
        source.rows(
            f"SELECT max(greatest({begin}, coalesce({end}, {begin}))) FROM {table} "
            "WHERE attempt = ? AND step >= ? AND rank >= 0",
            [attempt, last_step],
        )[0][0]
        for table, begin, end in _TIMED
        if source.has(table)
    ]
    return max(int(time) for time in times if time is not None)
