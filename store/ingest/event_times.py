"""Date events by the monotonic clock, as records of steps and calls are dated.

    events, anchor_ns = dated(events, anchor_ns, is_node=False)

The wall clock may be set during a run, for instance by NTP. A record of a tape is dated by the monotonic clock and by
the wall time at which its rank began. An event has the wall time of its moment: after the clock was set by an hour,
the run would seem to end an hour after, or before, its last step.

An anchor is the wall time minus the monotonic time. A rank's events have the anchor of its tapes. Events of a node's
processes have the anchor of the last start of a launcher, a `watch` or an attempt, because the machine may have been
restarted before it, which restarts the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probes.tape import event_kinds

__all__ = ["dated"]

LEAST_NS = 1_000_000_000
"""Minimum change of the wall clock (ns) that counts as set; the time between the two readings of the clocks is less."""
_STARTS = (event_kinds.RUN_STARTED, event_kinds.WATCH_STARTED, event_kinds.ATTEMPT_STARTED)


def dated(
    events: Sequence[dict[str, Any]], anchor_ns: int | None, *, is_node: bool
) -> tuple[list[dict[str, Any]], int | None]:
    """Return the events, and the anchor of the events that follow. `anchor_ns`: that of the tapes, or for a node the
    one returned for the events before these; None if unknown."""
    found = []
    for event in events:
        mono_ns, wall_ns = event.get("mono_ns"), event.get("wall_ns")
        if isinstance(mono_ns, int) and isinstance(wall_ns, int):
            if is_node and event["kind"] in _STARTS:
                anchor_ns = wall_ns - mono_ns
            elif anchor_ns is not None and abs(mono_ns + anchor_ns - wall_ns) > LEAST_NS:
                event = event | {"wall_ns": mono_ns + anchor_ns}
        found.append(event)
    return found, anchor_ns
