"""Checkpoints: saves that fail or come too late, the age of the last good one, and what saving costs.

    saved_checkpoints(store, Scope(manifest=run.manifest()))
    # kinds checkpoint_failed, checkpoint_age; advice checkpoint_cost

* A failed save on disk is reported with its reason. It is critical if no later save was good: a failure of the run
  would then cost everything since the last good save.
* A failed copy to an address (`checkpoint.remote`) is reported only if no save on disk failed, as a warning: the disk
  still has the checkpoint.
* The *age* of the last good checkpoint is counted in steps. More than three times the usual distance between saves
  means that saving has stopped.
* The *cost* is the share of time in which saves stall training, and the number of saves that waited until the previous
  one was written.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from analyzers.analysis import Analysis
from analyzers.checkpoints.policy import SaveAgePolicy
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Source, every_kth_rank, lacking
from analyzers.wording import counted, number
from probes.settings.described import CheckpointFacts
from probes.settings.section import read

__all__ = ["ANALYSES", "good_saves", "saved_checkpoints"]

_SAVED = ("complete", "verified", "good")


def saved_checkpoints(source: Source, scope: Scope) -> list[Finding]:
    """Findings over the whole run."""
    interval = read(CheckpointFacts, scope.manifest).interval
    if absent := lacking(source, steps=("duration_ns",)):
        return [_insufficient(not_recorded(absent), missing(absent))]
    ((newest_step,),) = source.rows("SELECT max(step) FROM steps WHERE duration_ns IS NOT NULL")
    if absent := lacking(source, checkpoints=("tier", "state", "step")):
        if interval == 0 and newest_step:
            return []  # checkpoints are off: the analyzer `settings` advises on that
        if interval is not None and (newest_step or 0) < interval:
            return []  # the run has not yet reached the step of its first save
        if scope.manifest.get("attached") and not lacking(source, steps=("checkpoint_ns",)):
            return _time_of_saves(source)
        return [_insufficient(not_recorded(absent), missing(absent))]
    failed = _failed(source, "disk") or _failed(source, "remote")
    found = [one for one in (failed, _age(source, newest_step or 0, interval)) if one]
    if lacking(source, checkpoints=("stall_ns",)):
        return [
            *found,
            _insufficient(
                "the time for which a save stalls training was not recorded", missing(["checkpoints.stall_ns"])
            ),
        ]
    cost = _cost(source)
    return [*found, cost] if cost else found


def _time_of_saves(source: Source) -> list[Finding]:
    """Attached loops: saves are phases of steps, and their files are unknown."""
    ((num_saves,),) = source.rows("SELECT count(DISTINCT step) FROM steps WHERE checkpoint_ns > 0")
    at_end = not lacking(source, spans=("kind", "step")) and source.rows(
        "SELECT 1 FROM spans WHERE kind = 'checkpoint' AND step > (SELECT max(step) FROM steps) LIMIT 1"
    )
    what = f"{counted(num_saves, 'step')} with saves were seen" if num_saves else "no save was seen"
    if at_end:
        what = f"{what}, and one after the last step" if num_saves else "a save after the last step was seen"
    return [_insufficient(f"{what}, and the checkpoints of attached loops are not examined", {"num_saves": num_saves})]


def _failed(source: Source, tier: str) -> Finding | None:
    rows = source.rows(
        "SELECT attempt, step, reason FROM checkpoints WHERE tier = ? AND state = 'failed' ORDER BY wall_ns", [tier]
    )
    if not rows:
        return None
    ((later,),) = source.rows(
        f"""
        SELECT count(*) FROM checkpoints WHERE tier = ? AND state IN {_SAVED} AND wall_ns > (
            SELECT max(wall_ns) FROM checkpoints WHERE tier = ? AND state = 'failed')
        """,
        [tier, tier],
    )
    attempt, step, reason = rows[-1]
    is_remote = tier == "remote"
    at_step = f"at step {step}" if step is not None else "before the first step"
    one, several = ("copy to the address", "copies to the address") if is_remote else ("save", "saves")
    what = f"{len(rows)} checkpoint {several} failed, the last one" if len(rows) > 1 else f"A checkpoint {one} failed"
    after = f"A later {one} was good." if later else f"No {one} has been good since."
    return Finding(
        analyzer="checkpoints",
        kind="checkpoint_failed",
        severity="warning" if later or is_remote else "critical",
        status="fired",
        first_step=rows[0][1],
        last_step=step,
        cause="failed",
        summary=f"{what} {at_step}: {_short(reason)}. {after}",
        evidence={"num_failed": len(rows), "reason": str(reason or "")[:500], "num_good_since": later, "tier": tier},
        advice="checkpoint-failed",
        attempt=attempt,
    )


def good_saves(source: Source) -> list[int]:
    """Steps that were saved to disk and neither failed nor were condemned, ascending."""
    rows = source.rows(
        f"SELECT DISTINCT step FROM checkpoints WHERE tier = 'disk' AND state IN {_SAVED} AND step IS NOT NULL "
        "AND (attempt, step) NOT IN (SELECT (attempt, step) FROM checkpoints WHERE tier = 'disk' AND "
        "state IN ('condemned', 'failed') AND step IS NOT NULL) ORDER BY step"
    )
    return [int(step) for (step,) in rows]


def _age(
    source: Source, newest_step: int, interval: float | None, policy: SaveAgePolicy = SaveAgePolicy()
) -> Finding | None:
    steps = good_saves(source)
    gaps = sorted(b - a for a, b in pairwise(steps))
    usual = int(interval) if interval and interval >= 1 else gaps[len(gaps) // 2] if gaps else 0
    if not usual:
        return None
    last = max((step for step in steps if step <= newest_step), default=0)
    age = newest_step - last
    if age < max(SHARED.clear_factor * usual, policy.min_steps):
        return None
    ((lost_s,),) = source.rows(
        "SELECT sum(took) / 1e9 FROM (SELECT median(duration_ns) AS took FROM steps "
        "WHERE step > ? AND duration_ns IS NOT NULL AND rank % ? = 0 GROUP BY step)",
        [last, every_kth_rank(source, "steps")],
    )
    since = (
        f"The last good checkpoint is of step {last}, {age} steps ago" if last else f"No good checkpoint in {age} steps"
    )
    return Finding(
        analyzer="checkpoints",
        kind="checkpoint_age",
        severity="warning",
        status="fired",
        first_step=last,
        last_step=newest_step,
        cause="old",
        summary=f"{since}, with one due every {usual}. A failure now costs {number(lost_s or 0)} s of training.",
        evidence={"age_steps": age, "interval_steps": usual, "last_good_step": last, "lost_s": round(lost_s or 0.0, 3)},
        advice="checkpoint-age",
    )


def _cost(source: Source) -> Finding | None:
    ((num_saves, stall_ms, longest_s, num_delayed),) = source.rows(
        """
        SELECT count(*) FILTER (state = 'verified' OR state = 'complete' AND tier = 'memory'),
               median(stall_ns) FILTER (state = 'complete') / 1e6, max(duration_ns) FILTER (tier = 'disk') / 1e9,
               count(*) FILTER (state = 'delayed') FROM checkpoints
        """
    )
    ((stalled_s, total_s),) = source.rows(
        """
        SELECT sum(stalled), sum(took) FROM (
            SELECT median(stalled) AS stalled, median(took) AS took FROM (
                SELECT attempt, rank, sum(coalesce(checkpoint_ns, 0)) / 1e9 AS stalled, sum(duration_ns) / 1e9 AS took
                FROM steps WHERE rank >= 0 AND duration_ns IS NOT NULL AND rank % ? = 0
                GROUP BY attempt, rank) GROUP BY attempt)
        """,
        [every_kth_rank(source, "steps")],
    )
    ((num_disk,),) = source.rows("SELECT count(*) FROM checkpoints WHERE tier = 'disk' AND state = 'complete'")
    if num_saves < SHARED.min_times or not total_s:
        return None
    share = (stalled_s or 0.0) / total_s
    parts = []
    if share >= SHARED.saving_ratio:
        parts.append(f"Saves stall training for {100 * share:.1f} % of the time, {number(stall_ms or 0)} ms each.")
    if num_disk and num_delayed >= max(SHARED.repeats, SHARED.large_share_ratio * num_disk):
        parts.append(
            f"{num_delayed} saves waited for the previous one to be written. "
            f"The longest write took {number(longest_s or 0)} s."
        )
    if not parts:
        return None
    return Finding.advise(
        "checkpoints",
        "checkpoint_cost",
        " ".join(parts),
        cause="stall" if share >= SHARED.saving_ratio else "slow",
        cost_s=round(stalled_s or 0.0, 3),
        evidence={
            "stall_ratio": round(share, 4),
            "stall_ms": round(stall_ms or 0.0, 3),
            "longest_save_s": round(longest_s or 0.0, 3),
            "num_saves": num_saves,
            "num_delayed": num_delayed,
        },
    )


def _short(reason: object) -> str:
    lines = str(reason or "").strip().splitlines()
    return lines[0][:100].replace(";", ",").rstrip(".") if lines else "no reason was recorded"


_insufficient = partial(Finding.not_judged, "checkpoints", "checkpoint_age", "Checkpoints were not checked")


ANALYSES = (
    Analysis(
        kinds=("checkpoint_age", "checkpoint_failed", "checkpoint_cost"),
        run=saved_checkpoints,
        records="histories",
        live="periodic",
    ),
)
