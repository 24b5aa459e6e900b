"""Validation losses of a run, from its events.

evaluations(source)[-1].loss           # the newest one, the mean over the validation sets
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from analyzers.run.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["Evaluation", "evaluations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation; `sets` has the loss of each validation set by name, where they have names."""

    attempt: int
    step: int
    loss: float
    wall_ns: int = 0
    sets: Mapping[str, float] = field(default_factory=dict)


def evaluations(source: Source) -> list[Evaluation]:
    """Evaluations with a finite loss in the order of their steps, each step as it was the last time.

    What an earlier attempt evaluated beyond the step from which a later one goes on is left out.
    """
    if not source.has("events"):
        return []
    events = EventLog.load(source, (event_kinds.EVALUATION,)).of(event_kinds.EVALUATION)
    newest: dict[int, Evaluation] = {}
    attempt = 0
    for event in sorted(events, key=lambda event: event.wall_ns):
        loss, step = event.number("loss"), event.step
        if step is None or loss is None or not math.isfinite(loss):
            continue
        named = event.detail.get("sets")
        sets = {
            str(name): float(value)
            for name, value in (named.items() if isinstance(named, Mapping) else ())
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        if event.attempt > attempt:
            attempt = event.attempt
            newest = {earlier: found for earlier, found in newest.items() if earlier < step}
        newest[step] = Evaluation(
            attempt=event.attempt, step=step, loss=loss, wall_ns=event.wall_ns, sets=sets if any(sets) else {}
        )
    return [newest[step] for step in sorted(newest)]
