"""Compare two loss curves at equal steps: their difference at the end, its noise, and where they diverge.

change = loss_change(a, b)
change.difference, change.noise, change.first_different_step
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analyzers.policy import SHARED
from analyzers.robust import MAD_TO_SIGMA
from analyzers.source import Source, floats, ints, missing_tables

__all__ = ["LossChange", "loss_change", "nonfinite_since"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChange:
    """Mean difference over the last tenth of the common steps (at least 10), in nats. It is positive if the second loss
    is higher."""

    common_steps: int
    difference: float
    noise: float
    """Standard error of the difference, from the step-to-step changes of both curves."""
    first_different_step: int | None
    """First step at which the losses are not bitwise identical; None if there is none."""
    is_real: bool
    """True if the difference exceeds `SHARED.outlier_sigmas` times the noise."""
    equal_tokens: bool = True
    """False if the runs train different numbers of tokens per step, so that equal steps cannot be compared."""


def _losses(source: Source) -> dict[int, float]:
    """{step: loss} of the lowest rank with losses; if a step ran more than once, of its last committed execution."""
    table = source.query(
        """
        SELECT step, arg_max(loss, (attempt, start_ns)) AS loss FROM steps
        WHERE loss IS NOT NULL AND coalesce(committed, true)
          AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
        GROUP BY step ORDER BY step
        """
    )
    return dict(zip(ints(table["step"]).tolist(), floats(table["loss"]).tolist(), strict=True))


def nonfinite_since(source: Source) -> int | None:
    """First step from which each recorded loss is NaN or Inf; None if the last one is finite, or none is recorded."""
    if missing_tables(source, "steps"):
        return None
    since = None
    for step, loss in reversed(_losses(source).items()):
        if math.isfinite(loss):
            break
        since = step
    return since


def loss_change(a: Source, b: Source, *, equal_tokens: bool = True) -> LossChange | None:
    """The second run's loss minus the first one's; None with fewer than 20 common steps with finite losses."""
    if missing_tables(a, "steps") or missing_tables(b, "steps"):
        return None
    losses_a, losses_b = _losses(a), _losses(b)
    common = sorted(losses_a.keys() & losses_b.keys())
    steps = [step for step in common if math.isfinite(losses_a[step]) and math.isfinite(losses_b[step])]
    if len(steps) < 20:
        return None
    curve_a, curve_b = (np.array([losses[step] for step in steps]) for losses in (losses_a, losses_b))
    unequal = np.flatnonzero(curve_a != curve_b)
    last = max(10, len(steps) // 10)
    # A change from step to step contains the noise of two losses, so its variance is halved.
    jumps = sum(float(np.median(np.abs(np.diff(curve)))) ** 2 for curve in (curve_a, curve_b))
    difference = float(np.mean(curve_b[-last:] - curve_a[-last:]))
    noise = MAD_TO_SIGMA * float(np.sqrt(jumps / 2 / last))
    return LossChange(
        common_steps=len(steps),
        difference=difference,
        noise=noise,
        is_real=abs(difference) > SHARED.outlier_sigmas * noise,
        equal_tokens=equal_tokens,
        first_different_step=int(steps[unequal[0]]) if len(unequal) else None,
    )
