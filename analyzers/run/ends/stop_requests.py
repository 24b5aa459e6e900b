"""Runs stopped by a signal to their launcher: the ends of ranks after the signal do not show a fault.

stop_ns = stop_of_stalled_run_ns(view, log)   # None unless the run was stalled before
root_deaths = before_stop(deaths, view, log)
stop = stop_while_training(view, log, policy)       # None if the run was stalled, or if no signal came
killed = killed_after(stop, view, log)       # {rank: seconds}
"""

from __future__ import annotations

from collections.abc import Iterable
from signal import SIGKILL

from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.endings import Death
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["before_stop", "killed_after", "stop_of_stalled_run_ns", "stop_while_training"]


def stop_of_stalled_run_ns(view: AttemptView, log: EventLog) -> int | None:
    """Time at which a signal requested the end of a run that `watch` had reported as stalled (epoch ns); else None."""
    still_ns = view.reported_stall_ns
    stops = (event.wall_ns for event in log.of(event_kinds.STOP_REQUESTED, attempt=view.attempt))
    return None if still_ns is None else min((when_ns for when_ns in stops if when_ns >= still_ns), default=None)


def before_stop(deaths: Iterable[Death], view: AttemptView, log: EventLog) -> list[Death]:
    """Deaths before the signal that stopped a run which `watch` had reported as stalled. A rank woken by the signal may
    raise an error, for example in a handler that prints to a lost terminal.
    """
    stop_ns = stop_of_stalled_run_ns(view, log)
    return [death for death in deaths if stop_ns is None or death.when_ns < stop_ns]


def stop_while_training(view: AttemptView, log: EventLog, policy: StallPolicy) -> Event | None:
    """The first request to stop an attempt while its ranks were making progress; None if there is none. Later silence,
    and ranks killed because they do not end, are effects of the stop.
    """
    stops = log.of(event_kinds.STOP_REQUESTED, attempt=view.attempt)
    stop = min(stops, key=lambda event: event.wall_ns, default=None)
    if stop is None or (view.reported_stall_ns is not None and view.reported_stall_ns < stop.wall_ns):
        return None
    # A signal long after the newest record comes from someone who ended a run that hung, even if nothing reported it.
    return stop if stop.wall_ns - view.last_ns <= policy.step_factor * view.median_step_ns else None


def killed_after(stop: Event, view: AttemptView, log: EventLog) -> dict[int, float]:
    """{rank: seconds after the stop} of ranks that did not end after the signal and were killed by their launcher."""
    ends = [event for event in log.of(event_kinds.RANK_STOPPED, attempt=view.attempt) if event.wall_ns >= stop.wall_ns]
    return {
        event.integer("exit_rank"): (event.wall_ns - stop.wall_ns) / 1e9
        for event in ends
        if event.integer("exit_code", 0) == -SIGKILL
    }
