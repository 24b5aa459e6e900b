"""Find persistently slow rows of a matrix rank x observation, with start and end, by robust statistics.

    segments = find_segments(excess, PersistencePolicy())      # excess over the peers / peers' own time
    segments[0].row, segments[0].begin, segments[0].end, segments[0].effect

1. Medians over blocks of 5 observations remove single jitters (a garbage collection, a page-out).
2. The noise of a block is estimated from differences of neighbouring blocks, over all ranks, so that a lasting slowdown
   does not count as noise.
3. Consecutive outlier blocks form a run. The run's median excess must exceed the smallest effect of interest, and k
   times the noise combined with the spread of the peers in the same observations (k grows with the number of places
   tried). Most of the run's single observations must agree. If a run that contains single normal blocks fails, its
   uninterrupted parts are tried.
4. The run's start and end are the observations that maximise the sum of (excess - half the effect).
5. Repeat with blocks of 25 and 100 observations, in which smaller slowdowns show. If at most every second step is
   observed, also use blocks of three, as few observations then span many steps.
6. Precedent: the excess must be well above the excess of any rank in any other window of the same length. Lasting noise
   (another job on a shared machine) is not part of a block's noise, but has precedents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import Matrix, observations_for
from analyzers.policy import SHARED
from analyzers.robust import difference_sigma, sigma
from analyzers.source import Ints
from analyzers.stragglers.policy import PersistencePolicy

__all__ = ["Segment", "find_segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Row `row` is slow in observations begin <= i < end by `effect` (median ratio)."""

    row: int
    begin: int
    end: int
    effect: float
    agreement: float
    noise: float
    peer_spread: float
    ongoing: bool
    num_required: float
    """Steps that it had to last, given the noise."""


def find_segments(
    excess: Matrix,
    policy: PersistencePolicy | None = None,
    *,
    min_length: int = SHARED.min_steps,
    steps: Ints | None = None,
) -> list[Segment]:
    """Find all segments of a group of peers, the largest effect first. `excess[rank, observation]` is a ratio;
    `min_length`: minimum number of steps of a segment that lasts to the end, if the noise allows so few; `steps`: the
    step of each observation if only some steps are stamped on a device, None if each observation is a step. On devices,
    which other jobs do not disturb, up to half of the ranks may be slow together.
    """
    policy = policy or PersistencePolicy()
    found: list[Segment] = []
    base_noise = 0.0
    num_rows, num_observations = excess.shape
    if num_rows < 2:
        return found
    num_together = 1 if steps is None else num_rows // 2
    steps = np.arange(num_observations) if steps is None else steps
    lengths = {SHARED.block_steps * scale: scale for scale in policy.scales}
    lengths[observations_for(SHARED.block_steps, steps)] = 1
    for length, scale in lengths.items():
        num_blocks = num_observations // length
        if num_blocks < 2 or num_observations < observations_for(min_length, steps):
            continue
        offset = num_observations - num_blocks * length  # so that the last block ends at the newest observation
        blocks = np.median(excess[:, offset:].reshape(num_rows, num_blocks, length), axis=2)
        base_noise = _noise(blocks, policy) if scale == 1 else base_noise
        # If there are only a few long blocks, their noise is poorly known. So it is at least that of the shortest
        # blocks, divided by the square root of the scale.
        noise = max(_noise(blocks, policy), base_noise / math.sqrt(scale))
        smallest = _smallest(policy, scale, num_rows)
        limits = _Limits(
            smallest=smallest, length=length, base_noise=base_noise, noise=noise, num_places=blocks.size,
            least=min_length, num_together=num_together,
        )  # fmt: skip
        threshold = max(smallest, SHARED.outlier_sigmas * noise) / 2
        for gap in (2, 1):  # a run that joins nearly all blocks may fail the test although parts of it pass
            for row, first, last in _runs(blocks, threshold, gap):
                begin, end = offset + first * length, offset + last * length
                if any(seen.row == row and seen.begin < end and begin < seen.end for seen in found):
                    continue
                segment = _judge(excess, steps, (row, begin, end), limits, policy, found)
                if segment is None:
                    continue
                # A smaller excess in the rest of the run continues the slowdown.
                rest = None
                if end - segment.end >= length:
                    rest = _judge(excess, steps, (row, segment.end, end), limits, policy, [*found, segment])
                if rest is not None and rest.begin <= segment.end:
                    effect = float(np.median(excess[row, segment.begin : rest.end]))
                    segment = replace(segment, end=rest.end, effect=effect, ongoing=rest.ongoing)
                found.append(segment)
    found = [segment for segment in found if not _has_precedent(excess, steps, segment, found, policy)]
    return sorted(found, key=lambda segment: -segment.effect)


def _has_precedent(
    excess: Matrix, steps: Ints, segment: Segment, found: list[Segment], policy: PersistencePolicy
) -> bool:
    """Return True if the median excess of some window as long as the segment, outside of all segments, is near the
    segment's effect.
    """
    length = min(segment.end - segment.begin, SHARED.block_steps * max(policy.scales))
    num_rows, num_observations = excess.shape
    if num_observations < 2 * length:
        length = max(observations_for(SHARED.min_steps, steps), num_observations // 4)
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
    factor = SHARED.beyond_factor if segment.ongoing else SHARED.beyond_few_factor
    return segment.effect < factor * largest


def _smallest(policy: PersistencePolicy, scale: int, num_rows: int) -> float:
    if num_rows == 2:
        return policy.lone_effect_ratio
    weak = scale == max(policy.scales) and num_rows >= SHARED.many_values
    return policy.weak_effect_ratio if weak else policy.min_effect_ratio


def _noise(blocks: npt.NDArray[np.float32], policy: PersistencePolicy) -> float:
    """Standard deviation of a block's median, from neighbouring blocks of the same rank."""
    if blocks.shape[1] < 2:
        return policy.min_noise_ratio
    return max(difference_sigma(blocks), policy.min_noise_ratio)


def _runs(blocks: npt.NDArray[np.float32], threshold: float, gap: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first block, one after the last) of runs above the threshold; `gap` blocks below it end a run."""
    hot = blocks >= threshold
    for row in np.flatnonzero(hot.any(axis=1)):
        places = np.flatnonzero(hot[row])
        for run in np.split(places, np.flatnonzero(np.diff(places) > gap) + 1):
            yield int(row), int(run[0]), int(run[-1]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Limits of the search with one length of block."""

    smallest: float
    """Smallest effect of interest."""
    length: int
    """Observations of a block."""
    base_noise: float
    """Noise of a block of the shortest length."""
    noise: float
    """Noise of a block of this length."""
    num_places: int
    """Blocks of all ranks: with more places tried, chance produces larger outliers."""
    least: int
    """Steps that a slowdown must last."""
    num_together: int
    """Number of ranks that may be slow at the same time."""


def _judge(
    excess: Matrix,
    steps: Ints,
    place: tuple[int, int, int],
    limits: _Limits,
    policy: PersistencePolicy,
    found: list[Segment],
) -> Segment | None:
    """Refine start and end of a run of blocks, and test it."""
    row, begin, end = place
    num_rows, num_observations = excess.shape
    rough = float(np.median(excess[row, begin:end]))
    begin, end = _refine(excess[row], begin, end, limits.length, rough / 2)
    own = excess[row, begin:end]
    effect = float(np.median(own))
    agreement = float(np.mean(own > min(effect / 2, policy.clear_excess_ratio)))
    ongoing = end >= num_observations - observations_for(SHARED.block_steps, steps)
    # A slowdown that has ended may have been caused by another job for a while, so it must be larger and longer.
    smallest = limits.smallest if ongoing else policy.lone_effect_ratio
    least = limits.least if ongoing else policy.min_length_ended
    num_required = least * max(1.0, SHARED.burst_sigmas * limits.base_noise / max(effect, 1e-9))
    if end - begin < observations_for(math.ceil(num_required), steps[begin:end]):
        return None
    # Ranks that are slow in the same steps are not peers to compare with: those found before, and those as slow as this
    # one, if no more are slow than can be at the same time (see `find_segments`).
    slow = {seen.row for seen in found if seen.begin < end and begin < seen.end}
    together = slow | _as_slow(excess[:, begin:end], effect)
    if len(together) <= limits.num_together:
        slow = together
    others = [i for i in range(num_rows) if i != row and i not in slow]
    apart = excess[others, begin:end]
    if row in slow and 2 * len(slow) == num_rows:  # if half of the ranks are slow, the others all lie below the median
        apart = apart - np.median(apart)
    elif len(others) == 2:  # the slow rank is half of what each is compared with, so both lie below
        apart = apart - apart[::-1]
    spread, dominated = _spread(apart, effect)
    sigmas = max(SHARED.outlier_sigmas, 1 + math.sqrt(2 * math.log(max(limits.num_places, 2))))
    uncertainty = math.hypot(limits.noise / math.sqrt(max(1.0, (end - begin) / limits.length)), spread)
    if effect < max(smallest, sigmas * uncertainty) or dominated or agreement < SHARED.agreement_ratio:
        return None
    return Segment(row=row, begin=begin, end=end, effect=effect, agreement=agreement, noise=limits.noise,
                   peer_spread=spread, ongoing=ongoing, num_required=num_required)  # fmt: skip


def _as_slow(values: Matrix, effect: float) -> set[int]:
    """Return the rows that have an excess near `effect` in most of these observations, including the judged row."""
    least = effect / SHARED.beyond_few_factor
    return set(np.flatnonzero(np.mean(values >= least, axis=1) >= SHARED.agreement_ratio).tolist())


def _spread(others: Matrix, effect: float) -> tuple[float, bool]:
    """Return (robust spread of the peers in these observations, True if one of the peers deviates nearly as much).

    The spread of a small group cannot be estimated: it is returned as 0, and only the second value counts.
    """
    if len(others) < 2:
        return 0.0, False
    middles = np.median(others, axis=1)
    if len(others) + 1 < SHARED.many_values:
        return 0.0, effect < SHARED.beyond_few_factor * float(np.max(np.abs(middles)))
    # A few peers give a poor estimate: with seven ranks its error is a third.
    uncertain = 1 + 2 / len(others)
    return uncertain * sigma(middles), False


def _refine(values: npt.NDArray[np.float32], begin: int, end: int, length: int, level: float) -> tuple[int, int]:
    """Find the start and end that maximise the sum of (value - level), starting one block outside of the rough start
    and end.

    A short disturbance before the onset, followed by normal observations, is not part of the slowdown.
    """
    votes = np.clip(values, 0.0, 2 * level) - level  # values are clipped, so that a single outlier does not decide
    low = max(0, begin - length)
    gains = np.cumsum(votes[low:end][::-1])[::-1]
    refined_begin = low + int(np.argmax(gains))
    gains = np.cumsum(votes[refined_begin : end + length])
    return refined_begin, refined_begin + int(np.argmax(gains)) + 1
