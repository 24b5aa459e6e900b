"""Ranks that pause again and again: most steps are as fast as their peers', but many take several times as long.

    segments = find_pauses(excess, PausePolicy())       # rank x observation; the same `Segment` as persistence

A cgroup limit or another job may stop a process for 80 ms at arbitrary moments. Some stops fall into times in which the
process waits for others anyway; the other stops delay all ranks. The median of the process's steps shows nothing. The
criterion is therefore how many observations of one rank alone are far off:

1. A pause is an observation in which the excess is twice the peers' whole work and many times the noise. An excess of
   half of the peers' work is enough if pauses occur in most steps, or in every n-th step, because noise is not
   periodic. Pauses may be that small: a slow network hides part of a short delay.
2. From the first to the last pause, a good part of the observations are pauses, without a long gap. This rule excludes
   a burst of another job on the machine.
3. Hardly any other rank pauses at the same time. Pauses of all ranks come from the machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import Matrix
from analyzers.policy import SHARED
from analyzers.source import Ints
from analyzers.stragglers.comparison.persistence import Segment
from analyzers.stragglers.policy import PausePolicy

__all__ = ["find_pauses"]

_QUARTILE_TO_SIGMA = 1 / 0.3186
"""Factor from the first quartile of absolute differences to sigma; the smallest quarter of them has no pause."""


def find_pauses(excess: Matrix, policy: PausePolicy | None = None, steps: Ints | None = None) -> list[Segment]:
    """Find ranks that pause, the worst first. `excess[rank, observation]` is a ratio; the effect is a mean.

    `steps`: number of the step of each observation.
    """
    policy = policy or PausePolicy()
    num_rows, num_observations = excess.shape
    if num_rows < 2 or num_observations < SHARED.min_steps:
        return []
    # Steps are compared at distances of 1 and 2: if every second step is a pause, all direct neighbours differ.
    apart = (np.abs(excess[:, lag:] - excess[:, :-lag]) for lag in (1, 2))
    noise = _QUARTILE_TO_SIGMA * min(float(np.quantile(one, 0.25)) for one in apart) / math.sqrt(2)
    found: list[Segment] = []
    is_pause = excess >= max(SHARED.doubled_factor, SHARED.certain_sigmas * noise)
    is_half = excess >= max(SHARED.explained_ratio, SHARED.sure_sigmas * noise)
    is_clear = excess >= max(SHARED.explained_ratio, SHARED.burst_sigmas * noise)
    for row in np.flatnonzero(is_half.sum(axis=1) >= SHARED.min_steps).tolist():
        segment = None
        if is_pause[row].sum() >= SHARED.min_steps:
            segment = _pauses_of(excess, is_pause, row, noise, policy)
        if segment is None and steps is not None and _has_rhythm(steps, is_half[row]):
            segment = _pauses_of(excess, is_half, row, noise, policy)
        if segment is None and is_clear[row].sum() >= SHARED.min_steps:
            most = _pauses_of(excess, is_clear, row, noise, policy)
            segment = most if most is not None and most.agreement >= SHARED.explained_ratio else None
        if segment is not None:
            found.append(segment)
    return sorted(found, key=lambda segment: -segment.effect)


def _has_rhythm(steps: Ints, is_pause: npt.NDArray[np.bool_]) -> bool:
    """Return True if, from the first pause to the last, every n-th step is a pause and hardly any other step is."""
    paused = steps[is_pause]
    distance = int(np.median(np.diff(paused)))
    during = (steps >= paused[0]) & (steps <= paused[-1])
    is_due = (steps[during] - paused[0]) % max(distance, 1) == 0
    agree = (is_due == is_pause[during]).mean() >= 1 - SHARED.equal_ratio
    return bool(agree and np.count_nonzero(~is_due) >= SHARED.min_steps)


def _pauses_of(
    excess: Matrix, is_pause: npt.NDArray[np.bool_], row: int, noise: float, policy: PausePolicy
) -> Segment | None:
    """The stretch of one rank's pauses; None if they are too small a share of its observations, or if other ranks pause
    as well.
    """
    places = np.flatnonzero(is_pause[row])
    begin, end = int(places[0]), int(places[-1]) + 1
    share = len(places) / (end - begin)
    others = int(np.delete(is_pause[:, begin:end], row, axis=0).sum(axis=1).max())
    longest_gap = int(np.diff(places).max())
    if (
        share < policy.min_share_ratio
        or longest_gap > SHARED.minor_ratio * (end - begin)
        or policy.peer_factor * others > len(places)
    ):
        return None
    num_observations = excess.shape[1]
    ongoing = num_observations - end <= SHARED.minor_ratio * (end - begin)
    if not ongoing and end - begin < policy.min_length_ended:
        return None
    end = num_observations if ongoing else end
    return Segment(
        row=row, begin=begin, end=end, effect=float(excess[row, begin:end].mean()), agreement=share, noise=noise,
        peer_spread=others / (end - begin), ongoing=ongoing, num_required=policy.min_length_ended,
    )  # fmt: skip
