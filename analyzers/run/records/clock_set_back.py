"""Restore the order of events if the wall clock was set back during a run.

    log = in_order(EventLog.load(source, SNAPSHOT_EVENTS), source)

A rank's records of steps and calls are timed by a monotonic clock. The wall time is read once, when recording starts,
and later times are computed from both. So these times never jump. An event, however, has the wall clock's time at that
moment. If the wall clock is set back by a minute during a run, later events are dated a minute too early: the run seems
to end before its last step, and a hang to last 0 s.

1. The first identity record of an attempt's ranks has both clocks, and thus their difference at that time.
2. An event's monotonic time plus that difference is its time without the setback. The event gets this time if it is
   later than the recorded one by more than `LEAST_NS`. An earlier time is not used, because a reboot restarts the
   monotonic clock.

Only attempts on one node are corrected, because clocks of several nodes have no common order.
"""

from __future__ import annotations

from dataclasses import replace

from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["in_order"]

LEAST_NS = 2_000_000_000
"""Minimum difference (ns) that counts; gradually adjusted clocks drift apart by less, even over hours."""
_BEFORE_ATTEMPT = (event_kinds.RUN_STARTED, event_kinds.WATCH_STARTED)
"""Kinds of events that are written before their attempt is known."""


def in_order(log: EventLog, source: Source) -> EventLog:
    """The events with their times corrected; the same log if no clock was set back."""
    identities = EventLog.load(source, (event_kinds.RANK,)).of(event_kinds.RANK)
    offsets: dict[int, tuple[int, int]] = {}
    nodes: dict[int, set[int]] = {}
    for identity in identities:
        mono_ns = identity.integer("mono_ns")
        nodes.setdefault(identity.attempt, set()).add(identity.integer("node_rank", 0))
        if mono_ns >= 0:
            begun_and_offset = mono_ns, identity.wall_ns - mono_ns
            offsets[identity.attempt] = min(offsets.get(identity.attempt, begun_and_offset), begun_and_offset)
    offsets = {attempt: found for attempt, found in offsets.items() if len(nodes[attempt]) == 1}
    events = log.all()
    moved = [_moved(event, offsets.get(event.attempt)) for event in events]
    return EventLog(moved) if any(new is not old for new, old in zip(moved, events, strict=True)) else log


def _moved(event: Event, begun_and_offset: tuple[int, int] | None) -> Event:
    mono_ns = event.integer("mono_ns")
    if begun_and_offset is None or mono_ns < begun_and_offset[0] or event.kind in _BEFORE_ATTEMPT:
        return event
    by_mono_ns = mono_ns + begun_and_offset[1]
    return replace(event, wall_ns=by_mono_ns) if by_mono_ns > event.wall_ns + LEAST_NS else event
