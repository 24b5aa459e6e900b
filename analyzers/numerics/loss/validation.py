"""Overfitting: the validation loss rises while the training loss falls.

    overfitting(source, scope)             # findings of kind `overfitting`

1. Take the evaluations in step order. If a step was evaluated again after a rollback or a restart, the last evaluation
   counts. Evaluations of an earlier training in the same process are left out.
2. Each of the `min_times` newest evaluations is above the lowest one by `min_share_ratio` and by `outlier_sigmas` times
   the noise of an evaluation, which is estimated from neighbouring evaluations without their trend.
3. Between the lowest and the newest evaluation the training loss has fallen; it is taken as the median over the steps
   before each of the two. If it rose, too, the run diverges and does not overfit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analyzers.finding import Finding
from analyzers.numerics.policy import DivergencePolicy
from analyzers.policy import SHARED
from analyzers.robust import sigma
from analyzers.run.records.evaluations import evaluations
from analyzers.run.records.trainings import training_starts
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import loss_text

__all__ = ["overfitting"]


def overfitting(source: Source, scope: Scope) -> list[Finding]:
    """The finding of kind `overfitting`, if there is one."""
    found = evaluations(source)
    first_step = max(
        (step for attempt, step in training_starts(source) if found and attempt == found[-1].attempt), default=0
    )
    found = [one for one in found if one.step >= first_step]
    lowest = _lowest_before_rise([one.loss for one in found])
    if lowest is None or lacking(source, steps=("step", "start_ns")):
        return []
    low, newest = found[lowest], found[-1]
    before, after = (_training_loss(source, one.step, DivergencePolicy().block_steps) for one in (low, newest))
    if before is None or after is None or after >= before:
        return []
    rise = newest.loss - low.loss
    share = f" (+{100 * rise / low.loss:.1f} %)" if low.loss > 0 else ""
    return [
        Finding(
            analyzer="validation",
            kind="overfitting",
            severity="warning",
            status="fired",
            first_step=low.step,
            last_step=newest.step,
            cause="",
            summary=(
                f"The validation loss rose from {loss_text(low.loss)} at step {low.step} to {loss_text(newest.loss)} "
                f"at step {newest.step}{share}, while the training loss fell from {loss_text(before)} to "
                f"{loss_text(after)}."
            ),
            evidence={
                "validation_loss_lowest": round(low.loss, 5),
                "validation_loss_newest": round(newest.loss, 5),
                "train_loss_then": round(before, 5),
                "train_loss_now": round(after, 5),
                "evaluations": len(found),
                "evaluations_since_lowest": len(found) - 1 - lowest,
            },
            advice="overfitting",
            attempt=newest.attempt,
        )
    ]


def _lowest_before_rise(losses: Sequence[float]) -> int | None:
    """Return the index of the lowest loss if the newest losses are clearly above it, otherwise None. Pure."""
    if len(losses) < SHARED.trend_values:
        return None
    lowest = int(np.argmin(losses))
    if len(losses) - 1 - lowest < SHARED.min_times:
        return None
    # Second differences contain no linear trend, and have six times the variance of one evaluation.
    noise = sigma(np.diff(np.asarray(losses), 2)) / math.sqrt(6)
    least = losses[lowest] + max(SHARED.min_share_ratio * abs(losses[lowest]), SHARED.outlier_sigmas * noise)
    return lowest if min(losses[-SHARED.min_times :]) > least else None


def _training_loss(source: Source, step: int, num_steps: int) -> float | None:
    """Median loss of the kept steps up to `step`, of the lowest rank that has one."""
    ((loss,),) = source.rows(
        """
        SELECT median(loss) FROM (
            SELECT step, arg_max(loss, start_ns) AS loss FROM steps
            WHERE step > ? AND step <= ? AND loss IS NOT NULL AND isfinite(loss) AND coalesce(committed, true)
              AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
            GROUP BY step)
        """,
        [step - num_steps, step],
    )
    return None if loss is None else float(loss)
