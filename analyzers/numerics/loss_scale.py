"""Collapse of the fp16 loss scale: it falls and does not recover, so ever more steps are dropped.

Each overflow drops a step and halves the scale, and the trainer writes an event. Some are healthy: the scale starts too
high on purpose, and is doubled every 2,000 good steps to test whether it still fits.

1. Overflows of the first `warm_up_steps` steps are the search for a scale that fits.
2. Collapse: `max_overflows` or more within `window_steps` after that, or a scale of `lowest_scale` or less, at which
   the next overflow no longer depends on the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.finding import Finding
from analyzers.numerics.policy import LossScalePolicy
from analyzers.run.event_log import Event, EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["loss_scale_collapse"]


def loss_scale_collapse(source: Source, scope: Scope, policy: LossScalePolicy = LossScalePolicy()) -> list[Finding]:
    """Findings of kind `loss_scale_collapse`, one an attempt at most; none where nothing overflowed."""
    by_attempt: dict[int, list[Event]] = {}
    for event in EventLog.load(source, (event_kinds.LOSS_SCALE,)).of(event_kinds.LOSS_SCALE, attempt=scope.attempt):
        if event.step is not None and event.number("scale") is not None:
            by_attempt.setdefault(event.attempt, []).append(event)
    found = ((attempt, _collapse(events, policy)) for attempt, events in sorted(by_attempt.items()))
    return [_finding(attempt, events) for attempt, events in found if events]


def _collapse(events: Sequence[Event], policy: LossScalePolicy) -> list[Event]:
    """The overflows of the collapse, to the last one; empty if there is none."""
    late = [event for event in events if (event.step or 0) > policy.warm_up_steps]
    for number, event in enumerate(late):
        last = number + policy.max_overflows - 1
        if last < len(late) and (late[last].step or 0) - (event.step or 0) < policy.window_steps:
            return late[number:]
    lowest = [number for number, event in enumerate(events) if (event.number("scale") or 0.0) <= policy.lowest_scale]
    return list(events[: lowest[0] + 1]) if lowest else []


def _finding(attempt: int, events: Sequence[Event]) -> Finding:
    first, last = events[0], events[-1]
    before, after = 2 * (first.number("scale") or 0.0), last.number("scale") or 0.0
    return Finding(
        analyzer="loss_scale",
        kind="loss_scale_collapse",
        severity="warning",
        status="fired",
        first_step=first.step,
        last_step=last.step,
        cause="overflow",
        summary=f"The fp16 loss scale fell from {before:g} to {after:g} over steps {first.step} to {last.step}.",
        evidence={"scale_before": before, "scale_after": after, "num_overflows": len(events)},
        advice="loss-scale-collapse",
        attempt=attempt,
    )
