"""Which ranks are persistently slower than the ranks that do the same work, and in what. Pure: matrices in, ranks out.

    for slow in find_stragglers(timings):
        slow.rank, slow.cause, slow.first_step, slow.excess_ms

1. A rank's own time of a phase is the phase without waits in collectives (`timings`): ranks leave a collective
   together, so whoever waits long is a victim. Checkpoints, evaluation and logging are left out: one rank may do those
   for all. Clocks are compared nowhere.
2. Peers have the same work: the same pipeline stage, and for loading also the same place in their tensor- and
   context-parallel groups, of which often the first alone loads. For each observation the excess of a rank is its own
   time minus the median of its peers' (itself excluded), over the peers' whole own time; for compute (forward,
   backward, optimizer) and for data. Ranks without peers are the business of `slow_alone`.
3. `persistence` finds who stands out, from which step to which, against the noise of this run; `change_point` who
   became slower than it was, by less; `pauses` who stops again and again and is as fast as the others in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from analyzers.account.timings import COMPUTE_PHASES, OWN_PHASES, Matrix, Timings, others_median
from analyzers.communication.slow_link import SlowGroupPolicy
from analyzers.source import Ints
from analyzers.stragglers.change_point import ChangePolicy, find_changes
from analyzers.stragglers.pauses import PausePolicy, find_pauses
from analyzers.stragglers.persistence import PersistencePolicy, Segment, find_segments

__all__ = [
    "Cause", "Straggler", "StragglerPolicy", "complete", "find_stragglers", "is_worth_telling", "steps_of",
]  # fmt: skip

Cause = Literal["compute", "data"]
MOSTLY = 0.7
"""Share of what a rank loses by pauses from which it lost it waiting for data, or in a time in which it was slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """Thresholds on top of `PersistencePolicy`, which holds the statistics."""

    persistence: PersistencePolicy = field(default_factory=PersistencePolicy)
    change: ChangePolicy = field(default_factory=ChangePolicy)
    pauses: PausePolicy = field(default_factory=PausePolicy)
    slow_group: SlowGroupPolicy = field(default_factory=SlowGroupPolicy)
    warm_up_steps: int = 5
    """First observations of an attempt that are left out (steps): compilation, allocators, caches, autotuning."""
    min_excess_ms: float = 0.3
    """Smallest excess of interest (ms per step): below, a timer's and the scheduler's own grain is seen."""
    min_step_share_ratio: float = 0.005
    """Smallest excess as a share of the whole step: a slow rank in a run that only communicates costs nothing."""
    second_cause_ratio: float = 0.3
    """A second cause of the same rank is told apart if its excess is this share of the first (two faults at once);
    below it is a side effect: a rank short of CPU is slow in everything."""
    critical_slowdown_ratio: float = 2.0
    """Step time with / without the rank from which the finding is critical."""
    since_step: int = 0
    """Only steps from here on (the live view)."""
    alone_effect_ratio: float = 0.10
    """Smallest growth over its own past of a rank without peers: as with one peer only, no spread is known."""
    alone_others_factor: float = 2.0
    """Its growth over the largest of another rank in the same observations, which do other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One slow rank with one cause: numbers for the finding. Times in ms per step, medians over its segments; means if
    it pauses."""

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
    paused_ratio: float = 0.0
    """Share of the steps in which it pauses, being as fast as the others in between; 0: it is slow in most of them."""
    alone: bool = False
    """Compared with its own past, since no rank has the same work."""


def find_stragglers(timings: Timings, policy: StragglerPolicy | None = None) -> list[Straggler]:
    """Slow ranks of one attempt by compute and data. Pure."""
    policy = policy or StragglerPolicy()
    found: list[Straggler] = []
    for peers in timings.peers:
        if len(peers) < 2 or len(timings.steps) < policy.persistence.min_length:
            continue
        compute, data = complete(timings.compute[peers]), complete(timings.own["data"][peers])
        together = compute + data
        whole: Matrix = np.maximum(others_median(together), 1e-3).astype(np.float32)
        in_data = np.zeros_like(data)  # of a rank that nobody loads like: unknown, which is nothing
        everybody = np.arange(len(peers))
        kinds: list[tuple[Cause, Ints, Matrix]] = [("compute", everybody, compute)]
        for loaders in (np.flatnonzero(np.isin(peers, group)) for group in timings.data_peers):
            if len(loaders) > 1:
                in_data[loaders] = data[loaders] - others_median(data[loaders])
                kinds.append(("data", loaders, data[loaders]))
        ranks: dict[int, list[Straggler]] = {}
        for cause, rows, values in kinds:
            excess_ms = values - others_median(values)
            by_row: dict[int, list[Segment]] = {}
            for segment in find_segments(excess_ms / whole[rows], policy.persistence):
                by_row.setdefault(segment.row, []).append(segment)
            for segment in find_changes(excess_ms / whole[rows], values, together[rows], policy.change):
                by_row.setdefault(segment.row, [segment])
            for row, segments in by_row.items():
                straggler = _measure(timings, peers[rows], row, cause, segments, excess_ms)
                if is_worth_telling(straggler, policy):
                    ranks.setdefault(int(rows[row]), []).append(straggler)
        alike = any(len(rows) == len(peers) for cause, rows, _ in kinds if cause == "data")
        excess_ms = together - others_median(together) if alike else compute - others_median(compute) + in_data
        for segment in find_pauses(excess_ms / whole, policy.pauses):
            if _explained(segment, excess_ms[segment.row], ranks.get(segment.row, [])):
                continue
            # What stops a rank does so wherever it is: one finding, of where it mostly was.
            at = slice(segment.begin, segment.end)
            mostly_data = in_data[segment.row, at].mean() > MOSTLY * excess_ms[segment.row, at].mean()
            cause = "data" if mostly_data else "compute"
            straggler = _measure(timings, peers, segment.row, cause, [segment], excess_ms, segment.agreement)
            if is_worth_telling(straggler, policy):
                ranks[segment.row] = [straggler]
        for stragglers in ranks.values():
            largest = max(s.excess_ms for s in stragglers)
            found += [s for s in stragglers if s.excess_ms >= policy.second_cause_ratio * largest]
    return sorted(found, key=lambda straggler: -straggler.excess_ms)


def _explained(pauses: Segment, excess_ms: Matrix, steady: list[Straggler]) -> bool:
    """Whether most of what a rank loses by pauses lies where it is slow in most steps anyway."""
    slow = np.zeros(len(excess_ms), dtype=bool)
    for segment in (segment for straggler in steady for segment in straggler.segments):
        slow[segment.begin : segment.end] = True
    lost = excess_ms[pauses.begin : pauses.end]
    return bool(lost[slow[pauses.begin : pauses.end]].sum() >= MOSTLY * lost.sum())


def is_worth_telling(straggler: Straggler, policy: StragglerPolicy) -> bool:
    """Whether it costs enough of a step."""
    share = straggler.excess_ms / max(straggler.step_ms, 1e-6)
    return straggler.excess_ms >= policy.min_excess_ms and share >= policy.min_step_share_ratio


def steps_of(steps: Ints, segment: Segment) -> int:
    """Steps that a segment's observations stand for: of a very long run not every one is looked at (`thinned`)."""
    own = steps[segment.begin : segment.end]
    return 1 + int(np.maximum(np.diff(own), 1).sum())


def complete(values: Matrix) -> Matrix:
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
    timings: Timings,
    peers: Ints,
    row: int,
    cause: Cause,
    segments: list[Segment],
    excess_ms: Matrix,
    paused_ratio: float = 0.0,
) -> Straggler:
    typical = np.mean if paused_ratio else np.median
    segments = sorted(segments, key=lambda segment: segment.begin)
    index = np.concatenate([np.arange(segment.begin, segment.end) for segment in segments])
    phases = COMPUTE_PHASES if cause == "compute" else ("data",)
    factors, excesses = {}, {}
    for phase in OWN_PHASES:
        values = complete(timings.own[phase][np.ix_(peers, index)])
        baseline = others_median(values)[row]
        mine, theirs = float(typical(values[row])), float(typical(baseline))
        excesses[phase] = float(typical(values[row] - baseline))
        factors[phase] = mine / theirs if theirs > 1e-3 else float("inf") if mine > 1e-3 else 1.0
    whole = complete(sum(timings.own[phase][np.ix_(peers, index)] for phase in OWN_PHASES))
    baseline = others_median(whole)[row]
    per_rank = typical(excess_ms[:, index], axis=1)
    excess = float(per_rank[row])
    next_slowest = float(np.max(np.delete(per_rank, row), initial=0.0))
    step_ms = float(typical(np.nanmedian(complete(timings.duration[np.ix_(peers, index)]), axis=0)))
    gain = max(0.0, excess - max(0.0, next_slowest))
    waits = complete(timings.wait[np.ix_(peers, index)])
    return Straggler(
        rank=int(timings.ranks[peers[row]]),
        cause=cause,
        segments=tuple(segments),
        first_step=int(timings.steps[segments[0].begin]),
        last_step=int(timings.steps[segments[-1].end - 1]),
        factor=float(typical(whole[row] / np.maximum(baseline, 1e-3))),
        excess_ms=excess,
        step_ms=step_ms,
        step_without_ms=max(step_ms - gain, step_ms * 0.01),
        phase_factors={phase: factors[phase] for phase in (*phases, *(p for p in OWN_PHASES if p not in phases))},
        phase_excess_ms=excesses,
        peers_wait_more_ms=float(typical(others_median(waits)[row] - waits[row])),
        num_steps=sum(steps_of(timings.steps, segment) for segment in segments),
        ongoing=segments[-1].ongoing,
        paused_ratio=paused_ratio,
    )
