"""Attempts that stood still until their end: the time at which this began, and the steps that had finished before.

standstill_ns = standstills(source, log)                 # {0: 1_795_722_353_972_086_103}
source.rows(f"SELECT ... WHERE {before_standstill(standstill_ns)}")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["Standstill", "before_standstill", "last_standstill", "newest_start_ns", "standstills"]

EVENTS = (event_kinds.STACKS, event_kinds.FINDING, event_kinds.RUN_ENDED)


class Standstill(NamedTuple):
    """Two times (epoch nanoseconds). At `reported_ns` `watch` reported the standstill. After `steps_until_ns` the
    recorded end of a step is only an interruption."""

    reported_ns: int
    steps_until_ns: int


def standstills(source: Source, log: EventLog | None = None) -> dict[int, int]:
    """{attempt that stood still until its end: `steps_until_ns`}. `log` holds `EVENTS`."""
    log = log or EventLog.load(source, EVENTS)
    reported = {event.attempt for kind in (event_kinds.STACKS, event_kinds.FINDING) for event in log.of(kind)}
    found = ((attempt, last_standstill(source, attempt, log)) for attempt in sorted(reported))
    return {attempt: standstill.steps_until_ns for attempt, standstill in found if standstill is not None}


def last_standstill(source: Source, attempt: int, log: EventLog) -> Standstill | None:
    """The reported standstill that lasted until the end of an attempt; None if there is none.

    A process that is interrupted during a standstill still ends its calls and phases and closes its tapes. So only
    newly started work counts as progress; otherwise terminating the job would erase a reported hang.
    """
    reports = [event.wall_ns for event in log.of(event_kinds.STACKS, attempt=attempt)]
    reports += [
        event.wall_ns
        for event in log.of(event_kinds.FINDING, attempt=attempt)
        if event.text("finding_kind") == "hang" and event.text("status") == "fired"
    ]
    ends = [event.text("reason") for event in log.of(event_kinds.RUN_ENDED, attempt=attempt)]
    if not reports or "finished" in ends:
        return None
    newest_ns = newest_start_ns(source, attempt)
    reported_ns = min((when_ns for when_ns in reports if when_ns > newest_ns), default=None)
    if reported_ns is None:
        return None
    # A host starts a step several steps before its device does, so the host's start plus the duration on the device is
    # too early as an end. A step that ended at the interruption then seems to have ended before the report, but nothing
    # was started after it.
    is_stamped = not lacking(source, steps=("stamped_steps",)) and source.rows(
        "SELECT 1 FROM steps WHERE attempt = ? AND stamped_steps > 0 LIMIT 1", [attempt]
    )
    return Standstill(reported_ns, newest_ns if is_stamped else reported_ns)


def newest_start_ns(source: Source, attempt: int) -> int:
    """Time at which a rank of an attempt last began a step, a span or a collective (epoch nanoseconds); 0: never."""
    newest_ns = 0
    for table, column in (("steps", "start_ns"), ("spans", "start_ns"), ("collectives", "issue_ns")):
        if source.has(table):
            ((found,),) = source.rows(f"SELECT max({column}) FROM {table} WHERE attempt = ?", [attempt])
            newest_ns = max(newest_ns, found or 0)
    return newest_ns


def before_standstill(standstill_ns: Mapping[int, int]) -> str:
    """SQL condition for steps that finished before a standstill that lasted to the end of their attempt.

    A rank that is interrupted during a standstill ends its step, and the duration of this step includes the standstill.
    """
    ends = standstill_ns.items()
    cuts = (f" AND NOT (attempt = {int(at)} AND start_ns + duration_ns > {int(ns)})" for at, ns in ends)
    return f"duration_ns IS NOT NULL{''.join(cuts)}"
