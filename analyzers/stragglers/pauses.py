"""Ranks that stop again and again: most of their steps are as fast as those of the peers, many take times as long.

    segments = find_pauses(excess, PausePolicy())       # rank x observation; the same `Segment` as persistence

A process that a cgroup limit or a neighbour stops for 80 ms, wherever it happens to be, loses some of those stops in
its own waiting for others. The median of its steps then says that nothing is wrong, while all ranks wait for each of
the others. So what counts here is how many observations are far off, and that they are one rank's alone:

1. A pause is an observation that is behind by twice the peers' whole work and by many times the noise.
2. From the first to the last of them they are a good part of the observations, without a long gap: a burst of
   something else on the machine is none.
3. Hardly any other rank has any at that time: pauses that all have are the machine's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analyzers.account.timings import Matrix
from analyzers.stragglers.persistence import Segment

__all__ = ["PausePolicy", "find_pauses"]

_QUARTILE_TO_SIGMA = 1 / 0.3186
"""Of absolute values; the quarter of the differences that is the smallest holds no pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePolicy:
    """Thresholds in parts of the peers' own time (ratios) and in observations (steps)."""

    min_excess_ratio: float = 2.0
    """Excess of a pause over the whole own work of the peers."""
    min_sigmas: float = 8.0
    """The same over the noise of one observation."""
    min_pauses: int = 10
    """Pauses from which they are no accident."""
    min_share_ratio: float = 0.15
    """Their share of the observations from the first to the last."""
    max_gap_ratio: float = 1 / 3
    """Longest time without one over all of that time."""
    peer_factor: float = 5.0
    """Pauses of the rank over those of any other in the same time."""
    min_length_ended: int = 50
    """Observations from the first to the last once it is over: a burst of something else is shorter."""
    newest_gaps: float = 5.0
    """Observations without a pause, in mean distances of two, from which it is over."""


def find_pauses(excess: Matrix, policy: PausePolicy | None = None) -> list[Segment]:
    """Ranks that pause, the worst first. `excess[rank, observation]` over the peers is a ratio; the effect a mean."""
    policy = policy or PausePolicy()
    num_rows, num_observations = excess.shape
    if num_rows < 2 or num_observations < policy.min_pauses:
        return []
    noise = _QUARTILE_TO_SIGMA * float(np.quantile(np.abs(np.diff(excess, axis=1)), 0.25)) / math.sqrt(2)
    is_pause = excess >= max(policy.min_excess_ratio, policy.min_sigmas * noise)
    found = []
    for row in np.flatnonzero(is_pause.sum(axis=1) >= policy.min_pauses):
        places = np.flatnonzero(is_pause[row])
        begin, end = int(places[0]), int(places[-1]) + 1
        share = len(places) / (end - begin)
        others = int(np.delete(is_pause[:, begin:end], row, axis=0).sum(axis=1).max())
        longest_gap = int(np.diff(places).max())
        if (
            share < policy.min_share_ratio
            or longest_gap > policy.max_gap_ratio * (end - begin)
            or policy.peer_factor * others > len(places)
        ):
            continue
        ongoing = num_observations - end <= policy.newest_gaps / share
        if not ongoing and end - begin < policy.min_length_ended:
            continue
        end = num_observations if ongoing else end
        effect = float(excess[row, begin:end].mean())
        found.append(
            Segment(row=int(row), begin=begin, end=end, effect=effect, agreement=share, noise=noise,
                    peer_spread=others / (end - begin), ongoing=ongoing)
        )  # fmt: skip
    return sorted(found, key=lambda segment: -segment.effect)
