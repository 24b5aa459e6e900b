"""A run that was stopped in a standstill: how its ranks end then says nothing of why it stood still.

own = before_stop(deaths, view, log)
"""

from __future__ import annotations

from collections.abc import Iterable

from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.endings import Death
from analyzers.run.records.event_log import EventLog
from probes.tape import event_kinds

__all__ = ["before_stop"]


def before_stop(deaths: Iterable[Death], view: AttemptView, log: EventLog) -> list[Death]:
    """The deaths before a signal asked the launcher for the end of a run that `watch` had reported as standing still.

    A rank that is woken by the signal may raise an error, as from a handler that prints to a lost terminal.
    """
    stood_ns = view.stood_still_ns
    if stood_ns is None:
        return [*deaths]
    stops = [event.wall_ns for event in log.of(event_kinds.STOP_REQUESTED, attempt=view.attempt)]
    stop_ns = min((when_ns for when_ns in stops if when_ns >= stood_ns), default=None)
    return [death for death in deaths if stop_ns is None or death.when_ns < stop_ns]
