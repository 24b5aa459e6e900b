"""Collapse of the fp16 loss scale: it falls and does not recover, so ever more steps are dropped.

Each overflow drops a step and halves the scale. The trainer writes an event for each overflow. In an attached loop (a
user's own training loop) the scale is recorded at each step. If it is lower after a step than before, the step has
overflowed. Some overflows are healthy: the scale starts too high on purpose, and is doubled every 2,000 good steps to
test whether it still fits.

1. Overflows of the first `warm_up_steps` steps are the search for a scale that fits.
2. After these steps, `max_overflows` or more within `slow_change_steps` are a collapse.
3. At any step, a scale of `LOWEST_SCALE` or less is a collapse: the gradients overflow although they are not scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analyzers.finding import Finding
from analyzers.numerics.policy import LossScalePolicy
from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["Overflow", "dropped_for_overflow", "loss_scale_collapse", "overflows"]

LOWEST_SCALE = 1.0
"""Scale at which losses are not scaled at all. `torch.amp.GradScaler` has no lower limit and halves it further."""

SERIES = "loss_scale"
"""Name of the scale among the scalars of an attached loop (`probes.attach.loop.loss_scaling`)."""


class Overflow(NamedTuple):
    """A step that was dropped, and the scale after it."""

    attempt: int
    step: int
    scale: float
    scale_before: float


def overflows(source: Source, attempt: int | None = None) -> list[Overflow]:
    """Overflows in the order of the steps; of one attempt, or of all attempts."""
    log = EventLog.load(source, (event_kinds.LOSS_SCALE,))
    found = [
        Overflow(event.attempt, event.step, scale, 2 * scale)
        for event in log.of(event_kinds.LOSS_SCALE, attempt=attempt)
        if event.step is not None and (scale := event.number("scale")) is not None
    ]
    if not missing_tables(source, "scalars"):
        rows = source.rows(
            """
            SELECT attempt, step, scale, before FROM (
                SELECT attempt, step, value AS before, lead(value) OVER (PARTITION BY attempt ORDER BY step) AS scale
                FROM scalars WHERE name = ? AND attempt = coalesce(?, attempt) AND (attempt, rank) IN (
                    SELECT (attempt, min(rank)) FROM scalars WHERE name = ? GROUP BY attempt)
            ) WHERE scale < before ORDER BY attempt, step
            """,
            [SERIES, attempt, SERIES],
        )
        found += [Overflow(*row) for row in rows]
    return found


def dropped_for_overflow(source: Source) -> set[tuple[int, int]]:
    """Return (attempt, step) of steps that a scaler dropped although every loss was finite, which only the scale can
    explain.
    """
    if missing_tables(source, "scalars"):
        return set()
    rows = source.rows(
        """
        SELECT attempt, step FROM steps SEMI JOIN (SELECT attempt, step FROM scalars WHERE name = ?)
        USING (attempt, step) GROUP BY attempt, step
        HAVING bool_or(NOT committed) AND bool_and(coalesce(isfinite(loss) AND isfinite(local_loss), true))
        """,
        [SERIES],
    )
    return {(attempt, step) for attempt, step in rows}


def loss_scale_collapse(source: Source, scope: Scope, policy: LossScalePolicy = LossScalePolicy()) -> list[Finding]:
    """Findings of kind `loss_scale_collapse`, at most one per attempt; none for an attempt without overflows."""
    by_attempt: dict[int, list[Overflow]] = {}
    for overflow in overflows(source, scope.attempt):
        by_attempt.setdefault(overflow.attempt, []).append(overflow)
    found = ((attempt, _collapse(overflowed, policy)) for attempt, overflowed in sorted(by_attempt.items()))
    return [_finding(attempt, collapse) for attempt, collapse in found if collapse]


def _collapse(found: Sequence[Overflow], policy: LossScalePolicy) -> list[Overflow]:
    """The overflows of the collapse; empty if there is none."""
    warm = [overflow for overflow in found if overflow.step > policy.warm_up_steps]
    for number, overflow in enumerate(warm):
        last = number + policy.max_overflows - 1
        if last < len(warm) and warm[last].step - overflow.step < SHARED.slow_change_steps:
            return warm[number:]
    lowest = [number for number, overflow in enumerate(found) if overflow.scale <= LOWEST_SCALE]
    return list(found[: lowest[0] + 1]) if lowest else []


def _finding(attempt: int, found: Sequence[Overflow]) -> Finding:
    first, last = found[0], found[-1]
    before, after = first.scale_before, last.scale
    return Finding(
        analyzer="loss_scale",
        kind="loss_scale_collapse",
        severity="warning",
        status="fired",
        first_step=first.step,
        last_step=last.step,
        cause="overflow",
        summary=f"The fp16 loss scale fell from {before:g} to {after:g} over steps {first.step} to {last.step}.",
        evidence={"scale_before": before, "scale_after": after, "num_overflows": len(found)},
        advice="loss-scale-collapse",
        attempt=attempt,
    )
