"""Steps that are slow at regular intervals, for example if every 20th step takes twice as long.

    findings = periodic_slow_steps(store, Scope())       # kind throughput, cause periodic

1. A step's duration is the median over its ranks. It is slow from `slow_factor` times the median of all steps.
2. Consecutive slow steps count once. There must be `trend_values` of them, most at equal intervals.
3. Together they must cost `min_cost_ratio` of the time. If a log prints only every n-th step, a printed step represents
   the steps since the previous line; the first step of an epoch represents only itself.
"""

from __future__ import annotations

import numpy as np

from analyzers.account.time_classes import TRAINING
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Source, floats, ints, missing_tables
from analyzers.stragglers.policy import PeriodicPolicy

__all__ = ["periodic_slow_steps"]


def periodic_slow_steps(source: Source, scope: Scope, policy: PeriodicPolicy | None = None) -> list[Finding]:
    """Report at most one interval at which steps are slow."""
    policy = policy or PeriodicPolicy()
    if missing_tables(source, "steps"):
        return []
    table = source.query(
        f"SELECT step, median({TRAINING}) / 1e6 AS took FROM steps WHERE rank >= 0 AND step >= ? "
        "AND duration_ns IS NOT NULL GROUP BY step ORDER BY step",
        [scope.since_step],
    )
    step, took_ms = ints(table["step"])[SHARED.warm_up_steps :], floats(table["took"])[SHARED.warm_up_steps :]
    if len(step) < 2 * SHARED.history:
        return []
    usual_ms = float(np.median(took_ms))
    slow = took_ms >= SHARED.slow_factor * usual_ms
    usual_ms = float(np.median(took_ms[~slow])) if not slow.all() else 0.0
    stride = max(1, int(np.median(np.diff(step))))
    starts = slow & ~np.append(False, slow[:-1])
    slow_at = step[starts]
    gaps = np.diff(slow_at)
    if len(slow_at) < SHARED.trend_values or not usual_ms:
        return []
    gap = int(np.median(gaps))
    equal = float((np.abs(gaps - gap) <= max(stride, SHARED.equal_ratio * gap)).mean())
    stands_for = np.clip(np.diff(step, prepend=step[0] - stride), 1, stride)
    excess_ms = float(((took_ms - usual_ms) * stands_for)[slow].sum())
    cost_ratio = excess_ms / float((took_ms * stands_for).sum())
    is_to_end = step[-1] - slow_at[-1] <= 2 * gap
    if equal < SHARED.agreement_ratio or gap < 2 * stride or cost_ratio < policy.min_cost_ratio or not is_to_end:
        return []
    slow_ms = float(np.median(took_ms[slow]))
    return [
        Finding(
            analyzer="throughput",
            kind="throughput",
            severity="warning",
            status="fired",
            summary=f"Every {gap} steps one takes {slow_ms / usual_ms:.2f}x as long: {slow_ms:,.4g} instead of "
            f"{usual_ms:,.4g} ms, {len(slow_at)} times since step {slow_at[0]}, {100 * cost_ratio:.0f} % of the time.",
            first_step=int(slow_at[0]),
            last_step=int(slow_at[-1]),
            cause="periodic",
            evidence={
                "every_steps": gap,
                "times": len(slow_at),
                "step_ms": round(usual_ms, 3),
                "slow_step_ms": round(slow_ms, 3),
                "factor_ratio": round(slow_ms / usual_ms, 3),
                "cost_ratio": round(cost_ratio, 4),
            },
            advice="throughput-periodic",
            cost_s=round(excess_ms / 1e3, 3),
        )
    ]
