"""Stragglers: a rank that is persistently slower than the ranks that do the same work, and in what.

1. A rank's own time of a phase is the phase without waits in collectives (`timings`): ranks leave a collective
   together, so whoever waits long is a victim. Checkpoints, evaluation and logging are left out: one rank may do those
   for all. Clocks are compared nowhere.
2. Peers have the same work: the same pipeline stage. For each observation the excess of a rank is its own time minus
   the median of its peers' (itself excluded), over the peers' whole own time; for compute (forward, backward,
   optimizer) and for data.
3. `persistence` finds who stands out, from which step to which, against the noise of this run.
4. Groups that do the same collective with the same size take the same time; the last to arrive sees the transfer
   alone. A group whose transfers are persistently slow points to a link or, with several meshes, to a rank.
5. Evidence: excess per phase, how often the rank arrived last in its collectives, the step time without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .finding import Finding
from .persistence import PersistencePolicy, Segment, find_segments
from .slow_group import SlowGroupPolicy, slow_groups
from .snapshot import attempts
from .source import Ints, Source, missing_tables
from .timings import COMPUTE_PHASES, OWN_PHASES, Matrix, Timings, load_timings, others_median

__all__ = ["Straggler", "StragglerPolicy", "analyze", "find_stragglers"]

Cause = Literal["compute", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """Thresholds on top of `PersistencePolicy`, which holds the statistics."""

    persistence: PersistencePolicy = field(default_factory=PersistencePolicy)
    slow_group: SlowGroupPolicy = field(default_factory=SlowGroupPolicy)
    warm_up_steps: int = 5
    """First observations of an attempt that are left out (steps): compilation, allocators, caches, autotuning."""
    min_excess_ms: float = 0.3
    """Smallest excess of interest (ms per step): below, a timer's and the scheduler's own grain is seen."""
    min_step_share_ratio: float = 0.01
    """Smallest excess as a share of the whole step: a slow rank in a run that only communicates costs nothing."""
    second_cause_ratio: float = 0.3
    """A second cause of the same rank is told apart if its excess is this share of the first (two faults at once);
    below it is a side effect: a rank short of CPU is slow in everything."""
    critical_slowdown_ratio: float = 2.0
    """Step time with / without the rank from which the finding is critical."""
    since_step: int = 0
    """Only steps from here on (the live view)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One slow rank with one cause: numbers for the finding. Times in ms per step, medians over its segments."""

    rank: int
    cause: Cause
    segments: tuple[Segment, ...]
    first_step: int
    last_step: int
    factor: float
    excess_ms: float
    step_ms: float
    step_without_ms: float
    phase_factors: dict[str, float]
    phase_excess_ms: dict[str, float]
    peers_wait_more_ms: float
    num_steps: int
    ongoing: bool


def analyze(source: Source, policy: StragglerPolicy | None = None) -> list[Finding]:
    """Findings of kind `straggler` with cause compute, data or communication, for each attempt."""
    policy = policy or StragglerPolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("no steps are recorded")]
    findings: list[Finding] = []
    judged = False
    for attempt in attempts(source):
        timings = load_timings(source, attempt, since_step=policy.since_step, skip_first=policy.warm_up_steps)
        if timings is None or len(timings.ranks) < 2:
            continue
        judged |= len(timings.steps) >= policy.persistence.min_length and any(len(p) > 1 for p in timings.peers)
        stragglers = find_stragglers(timings, policy)
        findings += [_finding(source, timings, straggler, policy) for straggler in stragglers]
        findings += _communication(source, timings, policy, stragglers)
    if not judged and not findings:
        ((world_size,),) = source.rows("SELECT count(DISTINCT rank) FROM steps")
        if world_size > 1:
            needed = policy.warm_up_steps + policy.persistence.min_length
            return [_insufficient(f"it takes two ranks with the same work and {needed} steps")]
    return findings


def find_stragglers(timings: Timings, policy: StragglerPolicy | None = None) -> list[Straggler]:
    """Slow ranks of one attempt by compute and data. Pure."""
    policy = policy or StragglerPolicy()
    found: list[Straggler] = []
    for peers in timings.peers:
        if len(peers) < 2 or len(timings.steps) < policy.persistence.min_length:
            continue
        own: dict[Cause, Matrix] = {
            "compute": _complete(timings.compute[peers]),
            "data": _complete(timings.own["data"][peers]),
        }
        whole: Matrix = np.maximum(others_median(own["compute"] + own["data"]), 1e-3).astype(np.float32)
        ranks: dict[int, list[Straggler]] = {}
        for cause, values in own.items():
            excess_ms = values - others_median(values)
            by_row: dict[int, list[Segment]] = {}
            for segment in find_segments(excess_ms / whole, policy.persistence):
                by_row.setdefault(segment.row, []).append(segment)
            for row, segments in by_row.items():
                straggler = _measure(timings, peers, row, cause, segments, excess_ms)
                share = straggler.excess_ms / max(straggler.step_ms, 1e-6)
                if straggler.excess_ms >= policy.min_excess_ms and share >= policy.min_step_share_ratio:
                    ranks.setdefault(row, []).append(straggler)
        for stragglers in ranks.values():
            largest = max(s.excess_ms for s in stragglers)
            found += [s for s in stragglers if s.excess_ms >= policy.second_cause_ratio * largest]
    return sorted(found, key=lambda straggler: -straggler.excess_ms)


def _complete(values: Matrix) -> Matrix:
    """Holes (a rank without a row of the observation) as the median of the others, which says nothing of the rank."""
    holes = np.isnan(values)
    if not holes.any():
        return values
    columns = np.flatnonzero(holes.any(axis=0))
    filled = values.copy()
    for column in columns:
        there = values[~holes[:, column], column]
        filled[holes[:, column], column] = np.median(there) if len(there) else 0.0
    return filled


def _measure(
    timings: Timings, peers: Ints, row: int, cause: Cause, segments: list[Segment], excess_ms: Matrix
) -> Straggler:
    segments = sorted(segments, key=lambda segment: segment.begin)
    index = np.concatenate([np.arange(segment.begin, segment.end) for segment in segments])
    phases = COMPUTE_PHASES if cause == "compute" else ("data",)
    factors, excesses = {}, {}
    for phase in OWN_PHASES:
        values = _complete(timings.own[phase][np.ix_(peers, index)])
        baseline = others_median(values)[row]
        mine, theirs = float(np.median(values[row])), float(np.median(baseline))
        excesses[phase] = float(np.median(values[row] - baseline))
        factors[phase] = mine / theirs if theirs > 1e-3 else float("inf") if mine > 1e-3 else 1.0
    whole = _complete(sum(timings.own[phase][np.ix_(peers, index)] for phase in OWN_PHASES))
    baseline = others_median(whole)[row]
    per_rank = np.median(excess_ms[:, index], axis=1)
    excess = float(per_rank[row])
    next_slowest = float(np.max(np.delete(per_rank, row), initial=0.0))
    step_ms = float(np.median(np.nanmedian(_complete(timings.duration[np.ix_(peers, index)]), axis=0)))
    gain = max(0.0, excess - max(0.0, next_slowest))
    waits = _complete(timings.wait[np.ix_(peers, index)])
    return Straggler(
        rank=int(timings.ranks[peers[row]]),
        cause=cause,
        segments=tuple(segments),
        first_step=int(timings.steps[segments[0].begin]),
        last_step=int(timings.steps[segments[-1].end - 1]),
        factor=float(np.median(whole[row] / np.maximum(baseline, 1e-3))),
        excess_ms=excess,
        step_ms=step_ms,
        step_without_ms=max(step_ms - gain, step_ms * 0.01),
        phase_factors={phase: factors[phase] for phase in (*phases, *(p for p in OWN_PHASES if p not in phases))},
        phase_excess_ms=excesses,
        peers_wait_more_ms=float(np.median(others_median(waits)[row] - waits[row])),
        num_steps=len(index),
        ongoing=segments[-1].ongoing,
    )


# ---- findings ----


def _finding(source: Source, timings: Timings, straggler: Straggler, policy: StragglerPolicy) -> Finding:
    arrivals = _arrivals(source, timings.attempt, straggler)
    slowdown = straggler.step_ms / straggler.step_without_ms
    since = f"since step {straggler.first_step}"
    when = since if straggler.ongoing else f"from step {straggler.first_step} to {straggler.last_step}, then over"
    caused = arrivals.caused_wait_ratio
    evidence: dict[str, Any] = {
        "factor_ratio": round(straggler.factor, 3),
        "excess_ms": round(straggler.excess_ms, 3),
        "phase_factors_ratio": {p: _json_number(f) for p, f in straggler.phase_factors.items()},
        "phase_excess_ms": {phase: round(value, 3) for phase, value in straggler.phase_excess_ms.items()},
        "peers_wait_more_ms": round(straggler.peers_wait_more_ms, 3),
        "step_ms": round(straggler.step_ms, 3),
        "step_without_it_ms": round(straggler.step_without_ms, 3),
        "speedup_without_it_ratio": round(slowdown, 3),
        "steps_slow": straggler.num_steps,
        "agreeing_steps_ratio": round(min(segment.agreement for segment in straggler.segments), 3),
        "noise_ratio": round(max(segment.noise for segment in straggler.segments), 4),
        "episodes": len(straggler.segments),
        "ongoing": straggler.ongoing,
    }
    if arrivals.num_checked:
        evidence["arrives_last_ratio"] = round(arrivals.num_last / arrivals.num_checked, 3)
        evidence["caused_wait_ratio"] = None if caused is None else round(caused, 3)
        evidence["collectives_checked"] = arrivals.num_checked
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="critical" if slowdown >= policy.critical_slowdown_ratio else "warning",
        status="fired",
        summary=f"rank {straggler.rank} is a straggler {when}: +{straggler.excess_ms:.3g} ms per step "
        f"({straggler.factor:.2f}x the median rank) in {straggler.cause}",
        ranks=(straggler.rank,),
        first_step=straggler.first_step,
        last_step=straggler.last_step,
        cause=straggler.cause,
        evidence=evidence,
        advice=f"straggler-{straggler.cause}",
        attempt=timings.attempt,
        cost_s=round((straggler.step_ms - straggler.step_without_ms) * straggler.num_steps / 1e3, 3),
    )


def _json_number(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None


ARRIVAL_STEPS = 50
"""Newest slow steps whose collectives are looked at: enough for a percentage, little enough for any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How a rank comes to its collectives: in how many it was last, and what share of all waiting it caused."""

    num_last: int
    num_checked: int
    caused_wait_ratio: float | None


def _arrivals(source: Source, attempt: int, straggler: Straggler) -> Arrivals:
    """The member with the shortest time in a collective came last; what the others were in it longer, they waited."""
    if not source.has("collectives"):
        return Arrivals(num_last=0, num_checked=0, caused_wait_ratio=None)
    first = max(straggler.first_step, straggler.last_step - ARRIVAL_STEPS)
    ((last, checked, caused_ns, waited_ns),) = source.rows(
        """
        SELECT count(*) FILTER (shortest = ?), count(*), sum(waited_ns) FILTER (shortest = ?), sum(waited_ns) FROM (
            SELECT arg_min(rank, end_ns - issue_ns) AS shortest,
                   CAST(sum(end_ns - issue_ns) - count(*) * min(end_ns - issue_ns) AS DOUBLE) AS waited_ns
            FROM collectives
            WHERE attempt = ? AND step BETWEEN ? AND ? AND end_ns IS NOT NULL AND op NOT IN ('send', 'recv')
            GROUP BY process_group, seq HAVING count(*) > 1 AND bool_or(rank = ?)
        )
        """,
        [straggler.rank, straggler.rank, attempt, first, straggler.last_step, straggler.rank],
    )
    ratio = (caused_ns or 0.0) / waited_ns if waited_ns else None
    return Arrivals(num_last=last, num_checked=checked, caused_wait_ratio=ratio)


def _communication(
    source: Source, timings: Timings, policy: StragglerPolicy, stragglers: Sequence[Straggler]
) -> list[Finding]:
    if missing_tables(source, "collectives") or len(timings.steps) < policy.persistence.min_length:
        return []
    slow = slow_groups(source, timings.attempt, policy.slow_group, since_step=int(timings.steps.min()))
    least_ms = policy.slow_group.min_step_share_ratio * float(np.nanmedian(timings.duration))
    findings = []
    for link in slow:
        if link.excess_ms < least_ms:
            continue
        if set(link.ranks) & {straggler.rank for straggler in stragglers}:
            continue  # its lateness is explained already
        one = len(link.ranks) == 1
        who = f"rank {link.ranks[0]}" if one else f"the link of ranks {', '.join(map(str, link.ranks[:8]))}"
        when = f"since step {link.first_step}" if link.ongoing else f"from step {link.first_step} to {link.last_step}"
        findings.append(
            Finding(
                analyzer="straggler",
                kind="straggler",
                severity="warning",
                status="fired",
                summary=f"{who} is slow in communication {when}: {link.op} in {', '.join(link.groups)} takes "
                f"{link.factor:.1f}x as long as in the groups beside it (+{link.excess_ms:.3g} ms per step)",
                ranks=link.ranks,
                first_step=link.first_step,
                last_step=link.last_step,
                cause="communication",
                evidence={
                    "process_groups": list(link.groups),
                    "op": link.op,
                    "bytes": link.num_bytes,
                    "factor_ratio": round(link.factor, 3),
                    "excess_ms": round(link.excess_ms, 3),
                    "transfer_ms": round(link.transfer_ms, 3),
                    "transfer_of_others_ms": round(link.others_ms, 3),
                },
                advice="straggler-communication",
                attempt=timings.attempt,
                cost_s=round(link.excess_ms * (link.last_step - link.first_step + 1) / 1e3, 3),
            )
        )
    return findings


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("straggler", "straggler", f"ranks were not compared: {why}")
