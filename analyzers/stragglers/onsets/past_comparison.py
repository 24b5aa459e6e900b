"""Comparison of ranks with their own past, for ranks that do other work than all other ranks. Pure functions.

    for slow in find_slower_than_before(timings, policy):
        slow.rank, slow.cause, slow.first_step, slow.factor          # 1.5: it takes 1.5 times as long as before

In a pipeline with one rank per stage, no two ranks have the same work. Often only one of the tensor-parallel ranks
loads data. A rank that was always slow cannot be distinguished from a rank with more work (`pipeline` measures the work
of a stage). A rank that became slow can be found:

1. Each rank's own time is divided by its usual time: the median of its fastest block of history length. So a slow part
   of the run is never the reference, however long it is.
2. `change_point` finds ranks with a ratio that grew relative to the other ranks in the same observations, and remained
   larger. Common causes (longer sequences, a shared host) cancel out.
3. Common causes that affect stages differently also make the times of other ranks grow. So the rank's own time must
   have grown twice as much as any other rank's.
4. A rank that waits long for a slow stage becomes slower itself, because its caches are cold. So a rank is not named if
   its time grew by far less than the total work of another rank did.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analyzers.account.timings import Matrix, Timings
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.stragglers.comparison.change_point import find_changes
from analyzers.stragglers.comparison.peer_comparison import (
    Cause,
    Straggler,
    is_significant,
    num_steps_of,
    outlasts_bursts,
    place_of,
    without_side_effects,
)
from analyzers.stragglers.comparison.persistence import Segment
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["find_slower_than_before"]

_LEAST_MS = 1e-3


def find_slower_than_before(timings: Timings, policy: StragglerPolicy | None = None) -> list[Straggler]:
    """In one attempt, find ranks without peers on which the compute or data time rose and stayed higher."""
    policy = policy or StragglerPolicy()
    if len(timings.ranks) < 2:
        return []
    own: dict[Cause, Matrix] = {"compute": timings.compute, "data": timings.own["data"]}
    groups = {"compute": timings.peers, "data": timings.data_peers}
    single = {cause: {int(rows[0]) for rows in groups[cause] if len(rows) == 1} for cause in own}
    whole = own["compute"] + own["data"]
    usual = _usual(whole)
    change = replace(policy.change, min_effect_ratio=policy.persistence.lone_effect_ratio)
    found: list[Straggler] = []
    compared = [(cause, "", values, whole) for cause, values in own.items()]
    compared += [  # also compare each place by itself, free of the noise of the other places
        ("compute", place, values, _with_median_rest(values, whole))
        for place, values in timings.own.items()
        if place != "data"
    ]
    for cause, place, values, noisy in compared:
        if not single[cause]:
            continue
        ratios = _compressed(values / usual)
        for segment in find_changes(ratios - others_median(ratios), values, noisy, change):
            is_lasting = segment.row in single[cause] and outlasts_bursts(timings, segment, policy)
            if is_lasting and _is_its_own(values, whole, segment, policy):
                straggler = _measure(timings, segment, cause, values, whole)
                straggler = replace(straggler, place=place or straggler.place)
                is_known = any(one.rank == straggler.rank and one.cause == cause for one in found)
                if not is_known and is_significant(straggler):
                    found.append(straggler)
    return sorted(without_side_effects(found), key=lambda straggler: -straggler.excess_ms)


def _with_median_rest(values: Matrix, total: Matrix) -> Matrix:
    """Add to `values`, the work in one phase or gap, each rank's usual work in the rest of the step. The result has the
    level of a whole step, but only the noise of this place. `total`: work in the whole step. Shapes (ranks, steps)."""
    rest = np.median(total, axis=1, keepdims=True) - np.median(values, axis=1, keepdims=True)
    with_rest: Matrix = values + np.maximum(rest, 0.0)
    return with_rest


def _grown(values: Matrix, begin: int) -> Matrix:
    """Median of each row from column `begin` to the end, minus the median before it."""
    after, before = np.median(values[:, begin:], axis=1), np.median(values[:, :begin], axis=1)
    return (after - before).astype(np.float32)


def _usual(whole: Matrix) -> Matrix:
    """Usual time per row: the median of its fastest block of `SHARED.history` observations, counted from the first."""
    length = SHARED.history
    count = max(1, whole.shape[1] // length)
    blocks = whole[:, : count * length].reshape(len(whole), count, -1)
    usual: Matrix = np.maximum(np.median(blocks, axis=2).min(axis=1, keepdims=True), _LEAST_MS).astype(np.float32)
    return usual


def _compressed(ratios: Matrix) -> Matrix:
    """Compress ratios above 2 logarithmically: a rank that is 50 times slower is also 50 times noisier, which would
    hide the change."""
    knee = SHARED.doubled_factor
    return np.where(ratios > knee, knee * (1 + np.log(np.maximum(ratios, knee) / knee)), ratios).astype(np.float32)


def _is_its_own(values: Matrix, whole: Matrix, segment: Segment, policy: StragglerPolicy) -> bool:
    """Return True if this rank slowed down much more than the others."""
    before = np.maximum(np.median(whole[:, : segment.begin], axis=1), _LEAST_MS)
    grown, of_all = _grown(values, segment.begin) / before, _grown(whole, segment.begin) / before
    others, others_of_all = (float(np.max(np.delete(growth, segment.row))) for growth in (grown, of_all))
    least = (
        policy.persistence.lone_effect_ratio,
        SHARED.beyond_few_factor * others,
        SHARED.minor_ratio * others_of_all,
    )
    return bool(grown[segment.row] >= max(least))


def _measure(timings: Timings, segment: Segment, cause: Cause, values: Matrix, whole: Matrix) -> Straggler:
    """Measure a slow rank against its own times before the onset."""
    row, before, after = segment.row, slice(0, segment.begin), slice(segment.begin, segment.end)
    excess_ms = float(np.median(values[row, after]) - np.median(values[row, before]))
    whole_before = max(float(np.median(whole[row, before])), 1e-3)
    factors, excesses = {}, {}
    for phase, values_of_phase in timings.own.items():
        own = values_of_phase[row]
        was, is_now = float(np.median(own[before])), float(np.median(own[after]))
        excesses[phase] = is_now - was
        factors[phase] = is_now / was if was > 1e-3 else float("inf") if is_now > 1e-3 else 1.0
    step_ms = float(np.median(np.median(timings.duration[:, after], axis=0)))
    waits = np.delete(timings.wait, row, axis=0)
    return Straggler(
        rank=int(timings.ranks[row]),
        cause=cause,
        segments=(segment,),
        first_step=int(timings.steps[segment.begin]),
        last_step=int(timings.steps[segment.end - 1]),
        factor=1 + excess_ms / whole_before,
        excess_ms=excess_ms,
        step_ms=step_ms,
        step_without_ms=max(step_ms - excess_ms, step_ms * 0.01),
        phase_factors=factors,
        phase_excess_ms=excesses,
        place=place_of(excesses, cause),
        peers_wait_more_ms=float(np.median(_grown(waits, segment.begin))),
        num_steps=num_steps_of(timings.steps, segment),
        ongoing=True,
        has_peers=False,
    )
