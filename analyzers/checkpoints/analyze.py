"""Checkpoints: saves that fail or come too late, the age of the last good one, and what saving costs.

    findings = analyze(store, run.manifest())       # kinds checkpoint_failed, checkpoint_age; advice checkpoint_cost

* A save on disk that failed is told with its reason, and as critical if no later one was good: from then on a failure
  costs everything since the last good one.
* The *age* of the last good checkpoint is counted in steps: more than `age_factor` of the usual distance between saves
  means that saving has stopped, whatever the reason.
* The *cost* is the share of the time for which training stood still for saves, and saves that had to wait because the
  one before was still being written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from analyzers.finding import Finding
from analyzers.run.setting import setting
from analyzers.source import Source, every_kth_rank, lacking

__all__ = ["SAVED", "CheckpointPolicy", "analyze"]

SAVED = ("complete", "verified", "good")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When saves are worth a word."""

    age_factor: float = 3.0
    """Steps since the last good one over the steps between saves."""
    min_age_steps: int = 20
    """A younger one is never called old."""
    cost_ratio: float = 0.05
    """Share of the time that saves may take; ByteRobust's stall of 10 to 40 ms a save is far below."""
    min_saves: int = 3
    """Saves from which a share means something."""
    delayed_ratio: float = 0.2
    """Share of saves that were begun late because the one before was still being written."""


def analyze(source: Source, manifest: Mapping[str, Any], policy: CheckpointPolicy | None = None) -> list[Finding]:
    """Findings over the whole run."""
    policy = policy or CheckpointPolicy()
    interval = setting(manifest, "checkpoint.interval")
    if absent := lacking(source, steps=("duration_ns",)):
        return [_insufficient(f"nothing in {', '.join(absent)}")]
    ((newest_step,),) = source.rows("SELECT max(step) FROM steps WHERE duration_ns IS NOT NULL")
    if absent := lacking(source, checkpoints=("tier", "state", "step")):
        if interval == 0 and newest_step:
            return []  # that is told as advice on the configuration
        if isinstance(interval, int) and (newest_step or 0) < interval:
            return []  # none was due
        return [_insufficient(f"nothing in {', '.join(absent)}: whether there is anything to resume from is not known")]
    found = [one for one in (_failed(source), _age(source, newest_step or 0, interval, policy)) if one]
    if lacking(source, checkpoints=("stall_ns",)):
        return [*found, _insufficient("how long training stood still for saves is not recorded (checkpoints.stall_ns)")]
    cost = _cost(source, policy)
    return [*found, cost] if cost else found


def _failed(source: Source) -> Finding | None:
    rows = source.rows(
        "SELECT attempt, step, reason FROM checkpoints WHERE tier = 'disk' AND state = 'failed' ORDER BY wall_ns"
    )
    if not rows:
        return None
    ((later,),) = source.rows(
        f"""
        SELECT count(*) FROM checkpoints WHERE tier = 'disk' AND state IN {SAVED} AND wall_ns > (
            SELECT max(wall_ns) FROM checkpoints WHERE tier = 'disk' AND state = 'failed')
        """
    )
    attempt, step, reason = rows[-1]
    count = f"{len(rows)} saves" if len(rows) > 1 else "a save"
    after = "a later one was good" if later else "none has been good since"
    return Finding(
        analyzer="checkpoints",
        kind="checkpoint_failed",
        severity="warning" if later else "critical",
        status="fired",
        first_step=rows[0][1],
        last_step=step,
        cause="failed",
        summary=f"{count} failed, the last one at step {step}: {_short(reason)}; {after}",
        evidence={"num_failed": len(rows), "reason": str(reason or "")[:500], "num_good_since": later},
        advice="checkpoint-failed",
        attempt=attempt,
    )


def _age(source: Source, newest_step: int, interval: Any, policy: CheckpointPolicy) -> Finding | None:
    steps = [
        step
        for (step,) in source.rows(
            f"SELECT DISTINCT step FROM checkpoints WHERE tier = 'disk' AND state IN {SAVED} AND step IS NOT NULL "
            "AND (attempt, step) NOT IN (SELECT (attempt, step) FROM checkpoints WHERE tier = 'disk' AND "
            "state IN ('condemned', 'failed') AND step IS NOT NULL) ORDER BY step"
        )
    ]
    gaps = sorted(b - a for a, b in pairwise(steps))
    usual = interval if isinstance(interval, int) and interval > 0 else gaps[len(gaps) // 2] if gaps else 0
    if not usual:
        return None
    last = max((step for step in steps if step <= newest_step), default=0)
    age = newest_step - last
    if age < max(policy.age_factor * usual, policy.min_age_steps):
        return None
    ((lost_s,),) = source.rows(
        "SELECT sum(took) / 1e9 FROM (SELECT median(duration_ns) AS took FROM steps "
        "WHERE step > ? AND duration_ns IS NOT NULL AND rank % ? = 0 GROUP BY step)",
        [last, every_kth_rank(source, "steps")],
    )
    return Finding(
        analyzer="checkpoints",
        kind="checkpoint_age",
        severity="warning",
        status="fired",
        first_step=last,
        last_step=newest_step,
        cause="old",
        summary=f"the last good checkpoint is of step {last}, {age} steps ago, where one is due every {usual}: "
        f"a failure now costs {lost_s or 0:.3g} s of training"
        if last
        else f"no good checkpoint in {age} steps, where one is due every {usual}: "
        f"a failure now costs all {lost_s or 0:.3g} s of training",
        evidence={"age_steps": age, "interval_steps": usual, "last_good_step": last, "lost_s": round(lost_s or 0.0, 3)},
        advice="checkpoint-age",
    )


def _cost(source: Source, policy: CheckpointPolicy) -> Finding | None:
    ((num_saves, stall_ms, took_s, delayed),) = source.rows(
        """
        SELECT count(*) FILTER (state = 'verified' OR state = 'complete' AND tier = 'memory'),
               median(stall_ns) FILTER (state = 'complete') / 1e6, max(duration_ns) FILTER (tier = 'disk') / 1e9,
               count(*) FILTER (state = 'delayed') FROM checkpoints
        """
    )
    ((stood_s, whole_s, num_attempts),) = source.rows(
        """
        SELECT sum(stood), sum(took), count(*) FROM (
            SELECT median(stood) AS stood, median(took) AS took FROM (
                SELECT attempt, rank, sum(coalesce(checkpoint_ns, 0)) / 1e9 AS stood, sum(duration_ns) / 1e9 AS took
                FROM steps WHERE rank >= 0 AND duration_ns IS NOT NULL AND rank % ? = 0
                GROUP BY attempt, rank) GROUP BY attempt)
        """,
        [every_kth_rank(source, "steps")],
    )
    ((num_disk,),) = source.rows("SELECT count(*) FROM checkpoints WHERE tier = 'disk' AND state = 'complete'")
    if num_saves < policy.min_saves or not whole_s or not num_attempts:
        return None
    share = (stood_s or 0.0) / whole_s
    is_late = num_disk and delayed >= max(2, policy.delayed_ratio * num_disk)
    if share < policy.cost_ratio and not is_late:
        return None
    late = f"{delayed} saves had to wait for the one before to be written ({took_s or 0:.3g} s at worst)"
    stands = f"training stands still for saves {100 * share:.1f} % of the time ({stall_ms or 0:.3g} ms each)"
    return Finding.advise(
        "checkpoints",
        "checkpoint_cost",
        "; ".join([stands] * (share >= policy.cost_ratio) + [late] * bool(is_late)),
        cause="stall" if share >= policy.cost_ratio else "slow",
        cost_s=round(stood_s or 0.0, 3),
        evidence={
            "stall_ratio": round(share, 4),
            "stall_ms": round(stall_ms or 0.0, 3),
            "longest_save_s": round(took_s or 0.0, 3),
            "num_saves": num_saves,
            "num_delayed": delayed,
        },
    )


def _short(reason: object) -> str:
    lines = str(reason or "no reason was recorded").strip().splitlines()
    return lines[0][:160] if lines else "no reason was recorded"


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("checkpoints", "checkpoint_age", f"checkpoints were not judged: {why}")
