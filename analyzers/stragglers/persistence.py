"""Which rank is persistently behind its peers, from when to when: robust statistics of a matrix rank x observation.

    segments = find_segments(excess, PersistencePolicy())      # excess over the peers / peers' own time
    segments[0].row, segments[0].begin, segments[0].end, segments[0].effect

1. Medians of blocks of 5 observations take out single jitters (a garbage collection, a page-out).
2. The noise of a block is estimated from differences of neighbouring blocks, over all ranks: a lasting slowdown does
   not hide in its own noise.
3. Blocks that stand out form runs. A run counts if its median excess is above the smallest effect of interest, above k
   times the noise, where k grows with the number of places looked at, and above the spread of the peers in the same
   observations; and if most of its single observations agree.
4. Its begin and end are found to the observation, where the sum of (excess - half the effect) is largest.
5. The same again with blocks of 25 and 100: a smaller slowdown shows in a longer time.
6. Precedent: the excess must be well above what any rank shows at any other time of the run over as long. Noise that
   lasts (a neighbour's job on a shared machine) is in no block's noise, but it has precedents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import Matrix
from analyzers.robust import neighbour_sigma, sigma

__all__ = ["PersistencePolicy", "Segment", "find_segments"]

MAX_PRECEDENT = 100
"""Longest window that is looked for a precedent (observations): what lasts longer is no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistencePolicy:
    """Thresholds in parts of the peers' own time (ratios) and in observations (steps)."""

    min_effect_ratio: float = 0.035
    """Smallest slowdown of interest: a rank that is 5 % slow is measured at 4 to 6 %."""
    weak_effect_ratio: float = 0.015
    """The same over a hundred steps and more among at least 8 ranks, whose spread is known well (2 % within 200)."""
    weak_peers: int = 8
    """Ranks in a group for that."""
    pair_effect_ratio: float = 0.10
    """With one peer only there is no spread of peers to compare with."""
    block: int = 5
    """Observations whose median is looked at: single ones vanish; two blocks are the 10 steps to detection."""
    scales: tuple[int, ...] = (1, 5, 20)
    """Blocks taken together."""
    min_noise_ratio: float = 0.004
    """A block's noise is never taken for less: four quiet blocks by accident are no proof of quiet."""
    min_sigmas: float = 4.0
    """Least k; it is 1 + sqrt(2 ln(places)) where more places are looked at, the bound for the largest of them."""
    peer_factor: float = 2.5
    """In groups of up to `small_group` the excess must be this many times the largest deviation of a peer."""
    small_group: int = 6
    """Ranks up to which the spread of the peers is their largest deviation and not a robust estimate."""
    agreement_ratio: float = 0.7
    """Share of single observations above half the effect: persistence."""
    min_length: int = 10
    """Observations of a run that goes on at the end, where the noise allows (issue 2: 5 % within 10 steps)."""
    quiet_ratio: float = 9.0
    """Effect / noise of a block from which `min_length` is enough; below, proportionally more observations are
    awaited. A neighbour's burst on a crowded machine is 3 to 6 times the noise and lasts 10 to 20 steps."""
    min_length_ended: int = 20
    """Observations of a run that is over: a neighbour's burst on a shared machine is shorter."""
    ended_effect_ratio: float = 0.10
    """Smallest slowdown of interest once it is over."""
    precedent_factor: float = 1.4
    """Excess over the largest one that any rank shows elsewhere over as long."""
    precedent_factor_ended: float = 2.0
    """The same once it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Row `row` is behind in observations begin <= i < end by `effect` (median ratio)."""

    row: int
    begin: int
    end: int
    effect: float
    agreement: float
    noise: float
    peer_spread: float
    ongoing: bool


def find_segments(excess: Matrix, policy: PersistencePolicy | None = None) -> list[Segment]:
    """All segments of a group of peers, the largest effect first. `excess[rank, observation]` is a ratio."""
    policy = policy or PersistencePolicy()
    found: list[Segment] = []
    finest = 0.0
    num_rows, num_observations = excess.shape
    if num_rows < 2:
        return found
    for scale in policy.scales:
        length = policy.block * scale
        num_blocks = num_observations // length
        if num_blocks < 2 and scale > 1:
            break
        if num_observations < policy.min_length:
            break
        offset = num_observations - num_blocks * length  # blocks end at the newest observation
        blocks = np.median(excess[:, offset:].reshape(num_rows, num_blocks, length), axis=2)
        finest = finest or _noise(blocks, policy)
        noise = max(_noise(blocks, policy), finest / math.sqrt(scale))  # few long blocks estimate it badly
        for row, first, last in _runs(blocks, max(0.7 * _smallest(policy, scale, num_rows), 2 * noise)):
            begin, end = offset + first * length, offset + last * length
            if any(seen.row == row and seen.begin < end and begin < seen.end for seen in found):
                continue
            segment = _judge(excess, row, begin, end, length, (finest, noise), blocks.size, scale, policy, found)
            if segment is not None:
                found.append(segment)
    found = [segment for segment in found if not _has_precedent(excess, segment, found, policy)]
    return sorted(found, key=lambda segment: -segment.effect)


def _has_precedent(excess: Matrix, segment: Segment, found: list[Segment], policy: PersistencePolicy) -> bool:
    """Whether windows as long as the segment, outside of all segments, come near to its effect."""
    length = min(segment.end - segment.begin, MAX_PRECEDENT)
    num_rows, num_observations = excess.shape
    if num_observations < 2 * length:
        length = max(policy.min_length, num_observations // 4)
    taken = np.zeros(excess.shape, dtype=bool)
    for other in found:
        taken[other.row, other.begin : other.end] = True
    largest = 0.0
    for shift in (0, length // 2):
        count = (num_observations - shift) // length
        if count < 1:
            continue
        windows = (num_rows, count, length)
        free = ~taken[:, shift : shift + count * length].reshape(windows).any(axis=2)
        if free.any():
            middles = np.median(excess[:, shift : shift + count * length].reshape(windows), axis=2)
            largest = max(largest, float(middles[free].max()))
    factor = policy.precedent_factor if segment.ongoing else policy.precedent_factor_ended
    return segment.effect < factor * largest


def _smallest(policy: PersistencePolicy, scale: int, num_rows: int) -> float:
    if num_rows == 2:
        return policy.pair_effect_ratio
    weak = scale == max(policy.scales) and num_rows >= policy.weak_peers
    return policy.weak_effect_ratio if weak else policy.min_effect_ratio


def _noise(blocks: npt.NDArray[np.float32], policy: PersistencePolicy) -> float:
    """Standard deviation of a block's median, from neighbouring blocks of the same rank."""
    if blocks.shape[1] < 2:
        return policy.min_noise_ratio
    return max(neighbour_sigma(blocks), policy.min_noise_ratio)


def _runs(blocks: npt.NDArray[np.float32], threshold: float) -> Iterator[tuple[int, int, int]]:
    """(row, first block, one after the last) of runs above the threshold; one block below does not end a run."""
    hot = blocks >= threshold
    for row in np.flatnonzero(hot.any(axis=1)):
        places = np.flatnonzero(hot[row])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 2) + 1):
            yield int(row), int(run[0]), int(run[-1]) + 1


def _judge(
    excess: Matrix,
    row: int,
    begin: int,
    end: int,
    length: int,
    noises: tuple[float, float],
    num_places: int,
    scale: int,
    policy: PersistencePolicy,
    found: list[Segment],
) -> Segment | None:
    finest, noise = noises
    num_rows, num_observations = excess.shape
    rough = float(np.median(excess[row, begin:end]))
    begin, end = _refine(excess[row], begin, end, length, rough / 2)
    if end - begin < policy.min_length:
        return None
    own = excess[row, begin:end]
    effect = float(np.median(own))
    agreement = float(np.mean(own > effect / 2))
    ongoing = end >= num_observations - policy.block
    smallest = _smallest(policy, scale, num_rows) if ongoing else policy.ended_effect_ratio
    least = (
        (policy.min_length if ongoing else policy.min_length_ended) * policy.quiet_ratio * finest / max(effect, 1e-9)
    )
    if end - begin < max(least, policy.min_length if ongoing else policy.min_length_ended):
        return None
    slow = {seen.row for seen in found if seen.begin < end and begin < seen.end}
    others = [i for i in range(num_rows) if i != row and i not in slow]
    spread, dominated = _spread(excess[others, begin:end], effect, policy)
    sigmas = max(policy.min_sigmas, 1 + math.sqrt(2 * math.log(max(num_places, 2))))
    uncertainty = math.hypot(noise / math.sqrt(max(1.0, (end - begin) / length)), spread)
    if effect < max(smallest, sigmas * uncertainty) or dominated or agreement < policy.agreement_ratio:
        return None
    return Segment(row=row, begin=begin, end=end, effect=effect, agreement=agreement, noise=noise,
                   peer_spread=spread, ongoing=ongoing)  # fmt: skip


def _spread(others: Matrix, effect: float, policy: PersistencePolicy) -> tuple[float, bool]:
    """(robust deviation of the peers among themselves in these observations, whether one is nearly as far off).

    Up to `small_group` ranks the second answer stands for the first.
    """
    if len(others) < 2:
        return 0.0, False
    middles = np.median(others, axis=1)
    if len(others) < policy.small_group:
        return 0.0, effect < policy.peer_factor * float(np.max(np.abs(middles)))
    # From a handful of peers the deviation is known badly: seven ranks give it to a third.
    uncertain = 1 + 2 / len(others)
    return uncertain * sigma(middles), False


def _refine(values: npt.NDArray[np.float32], begin: int, end: int, length: int, level: float) -> tuple[int, int]:
    """The begin and end, within a block of the rough ones, that make the sum of (value - level) largest."""
    votes = np.clip(values, 0.0, 2 * level) - level  # one jitter must not outvote the steps around it
    low, high = max(0, begin - length), min(len(values), begin + length)
    gains = np.cumsum(votes[low:high][::-1])[::-1]
    refined_begin = low + int(np.argmax(gains))
    low, high = max(refined_begin + 1, end - length), min(len(values), end + length)
    gains = np.cumsum(votes[low:high])
    refined_end = low + int(np.argmax(gains)) + 1 if len(gains) else end
    return refined_begin, refined_end
