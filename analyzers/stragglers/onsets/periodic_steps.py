"""Steps that are slow at regular intervals, for example if every 20th step takes twice as long.

    findings = periodic_slow_steps(store, Scope())       # kind throughput, cause periodic

1. A step's duration is the median over its ranks. It is slow from `slow_factor` times the median of all steps.
2. Consecutive slow steps count once. There must be `trend_values` of them, most at equal intervals.
3. Together they must cost `min_cost_ratio` of the time. If a log prints only every n-th step, a printed step represents
   the steps since the previous line; the first step of an epoch represents only itself.

Of the steps of a log no more is known; `periodic_work` finds the cause in recorded steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.time_classes import TRAINING
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Floats, Ints, Source, floats, ints, missing_tables
from analyzers.stragglers.policy import PeriodicPolicy

__all__ = ["Rhythm", "find_rhythm", "periodic_slow_steps", "rhythm_finding"]

_ORDERS = 1000
_NEWEST = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Slow steps at regular intervals. `usual_ms`, `slow_ms`: medians of the other and of the slow steps."""

    every_steps: int
    slow_steps: Ints
    times: int
    """Number of slow steps; consecutive ones count once."""
    first_step: int
    last_step: int
    usual_ms: float
    slow_ms: float
    excess_ms: float
    cost_ratio: float
    chance_ratio: float
    """Share of random orders of the steps that are as regular."""


def periodic_slow_steps(source: Source, scope: Scope, policy: PeriodicPolicy | None = None) -> list[Finding]:
    """Report at most one interval at which the steps of a log are slow."""
    if missing_tables(source, "steps"):
        return []
    table = source.query(
        f"SELECT step, median({TRAINING}) / 1e6 AS took FROM steps WHERE rank >= 0 AND step >= ? "
        "AND duration_ns IS NOT NULL GROUP BY step ORDER BY step",
        [scope.since_step],
    )
    step, took_ms = ints(table["step"])[SHARED.warm_up_steps :], floats(table["took"])[SHARED.warm_up_steps :]
    rhythm = find_rhythm(step, took_ms, policy or PeriodicPolicy())
    return [] if rhythm is None else [rhythm_finding(rhythm)]


def find_rhythm(step: Ints, took_ms: Floats, policy: PeriodicPolicy, *, typical: bool = False) -> Rhythm | None:
    """Find the interval at which steps are slow; `step` in order. `typical`: steps that are slower by less than half as
    much as the median slow step do not count, because a machine's pauses fall between those of an interval. Pure."""
    if len(step) < 2 * SHARED.history:
        return None
    usual_ms = float(np.median(took_ms))
    slow = took_ms >= SHARED.slow_factor * usual_ms
    usual_ms = float(np.median(took_ms[~slow])) if not slow.all() else 0.0
    if typical and slow.any():
        slow = took_ms >= usual_ms + SHARED.explained_ratio * (float(np.median(took_ms[slow])) - usual_ms)
    stride = max(1, int(np.median(np.diff(step))))
    starts = slow & ~np.append(False, slow[:-1])
    slow_at = step[starts]
    gaps = np.diff(slow_at)
    if len(slow_at) < SHARED.trend_values or not usual_ms:
        return None
    gap = int(np.median(gaps))
    stands_for = np.clip(np.diff(step, prepend=step[0] - stride), 1, stride)
    excess_ms = float(((took_ms - usual_ms) * stands_for)[slow].sum())
    cost_ratio = excess_ms / float((took_ms * stands_for).sum())
    is_to_end = step[-1] - slow_at[-1] <= 2 * gap
    is_regular = _equal_ratio(step, slow) >= SHARED.agreement_ratio
    if not is_regular or gap < 2 * stride or cost_ratio < policy.min_cost_ratio or not is_to_end:
        return None
    return Rhythm(
        every_steps=gap, slow_steps=step[slow], times=len(slow_at), first_step=int(slow_at[0]),
        last_step=int(slow_at[-1]), usual_ms=usual_ms, slow_ms=float(np.median(took_ms[slow])), excess_ms=excess_ms,
        cost_ratio=cost_ratio, chance_ratio=_chance_ratio(step, slow),
    )  # fmt: skip


def _chance_ratio(step: Ints, slow: npt.NDArray[np.bool_]) -> float:
    """Share of random orders of the newest steps in which as many distances are equal."""
    step, slow, rng = step[-_NEWEST:], slow[-_NEWEST:], np.random.default_rng(0)
    found = _equal_ratio(step, slow)
    return float(np.mean([_equal_ratio(step, rng.permutation(slow)) >= found for _ in range(_ORDERS)]))


def _equal_ratio(step: Ints, slow: npt.NDArray[np.bool_]) -> float:
    """Share of the distances between slow steps that are equal to their median; consecutive slow steps count once."""
    gaps = np.diff(step[slow & ~np.append(False, slow[:-1])])
    if not len(gaps):
        return 0.0
    gap = int(np.median(gaps))
    stride = max(1, int(np.median(np.diff(step))))
    return float((np.abs(gaps - gap) <= max(stride, SHARED.equal_ratio * gap)).mean())


def rhythm_finding(rhythm: Rhythm) -> Finding:
    """Report the rhythm."""
    factor = rhythm.slow_ms / rhythm.usual_ms
    return Finding(
        analyzer="throughput",
        kind="throughput",
        severity="warning",
        status="fired",
        summary=f"Every {rhythm.every_steps} steps one takes {factor:.2f}x as long: {rhythm.slow_ms:,.4g} instead of "
        f"{rhythm.usual_ms:,.4g} ms, {rhythm.times} times since step {rhythm.first_step}, "
        f"{100 * rhythm.cost_ratio:.0f} % of the time.",
        first_step=rhythm.first_step,
        last_step=rhythm.last_step,
        cause="periodic",
        evidence={
            "every_steps": rhythm.every_steps,
            "times": rhythm.times,
            "step_ms": round(rhythm.usual_ms, 3),
            "slow_step_ms": round(rhythm.slow_ms, 3),
            "factor_ratio": round(factor, 3),
            "cost_ratio": round(rhythm.cost_ratio, 4),
        },
        advice="throughput-periodic",
        cost_s=round(rhythm.excess_ms / 1e3, 3),
    )
