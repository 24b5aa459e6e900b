"""Change points: find ranks that became slower than their peers during the run, and stayed slower.

    segments = find_changes(excess, own_ms, whole_ms)     # matrices [ranks, observations]; a list of `Segment`

Healthy ranks differ permanently by up to a few percent. To be 2 or 5 % slower than the peers is therefore proof of a
slowdown only among many ranks. Among few ranks, the proof is a lasting *change* of the difference. Example: rank 2 is
1 % slower than its peers up to step 100, and 4 % slower from step 101 on. The onset is step 101, and the effect is 3 %.

1. Take the excess of each rank's time over its peers' in the same observation, so that common effects cancel out. Clip
   it at a few times its noise, so that a long pause weighs no more than another outlier.
2. Try all onsets. The test statistic of an onset is the mean after it minus the mean before it, in units of the noise
   of this difference. The onset with the largest statistic is taken. This is the generalised likelihood ratio of a
   change of unknown size and time (CUSUM is its running form). The limit grows with the number of ranks and onsets.
3. Noise is not white on a shared machine. Its size is measured over windows of several lengths, and the largest counts.
   It does not date the onset: it is larger for onsets that leave room for longer windows, which would favour others.
4. The effect must exceed a multiple of the largest rise of another rank at the same onset. It must also exceed a
   multiple of the largest deviation of a window of similar length, on any rank before the onset or on another rank
   after it.
5. The rank's own time must have grown. With a single peer, this separates a slower rank from a faster peer.

Only slowdowns that last to the newest observation are found.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import Matrix
from analyzers.policy import SHARED
from analyzers.robust import difference_sigma
from analyzers.stragglers.comparison.persistence import Segment
from analyzers.stragglers.policy import ChangePolicy, StragglerPolicy

__all__ = ["crowding", "find_changes", "steps_for_crowding"]

_GROUP_SAMPLES = 9
"""The median of a group of observations is computed from at most this many of them."""
_WINDOWS = (1, 2, 4, 8)
"""Lengths of the windows over which noise is measured."""
MAX_OBSERVATIONS = 2_000
"""Maximum number of values per rank. Longer histories are replaced by medians of groups: 5,000 observations by medians
of 3. An onset is then known to within one group.
"""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def find_changes(excess: Matrix, own_ms: Matrix, whole_ms: Matrix, policy: ChangePolicy | None = None) -> list[Segment]:
    """Find ranks that became slower and remained slower, the largest change first.

    `excess`: ratio over the peers; `own_ms`: times of the judged phase; `whole_ms`: times of all own work, because
    their noise shows how busy the machine is. All are [ranks, observations].
    """
    policy = policy or ChangePolicy()
    num_rows, num_observations = excess.shape
    group = max(1, -(-num_observations // MAX_OBSERVATIONS))
    offset = num_observations % group
    values = _grouped(excess, group)
    if values.shape[1] < SHARED.history + SHARED.min_steps or num_rows < 2:
        return []
    sigma = max(difference_sigma(values), policy.min_noise_ratio / math.sqrt(group))
    middle = np.median(values, axis=1, keepdims=True)
    clipped = middle + np.clip(values - middle, -SHARED.outlier_sigmas * sigma, SHARED.outlier_sigmas * sigma)
    limit = 1.5 + math.sqrt(2 * math.log(values.size))
    if num_rows < SHARED.many_values:
        limit = max(policy.min_sigmas_few, limit)
    scores, onsets = _scan(clipped, [(1, sigma)])
    suspected = np.flatnonzero(scores >= limit)
    if not len(suspected):
        return []
    per_window = _noise_by_window(_without_changes(clipped, suspected, onsets), sigma)
    scores, _ = _scan(clipped, per_window)
    found = []
    noise_of_work = crowding(whole_ms)
    noisy = [(size, noise) for size, noise in per_window if noise >= policy.lasting_noise * sigma]
    for row in suspected[scores[suspected] >= limit]:
        segment = _judge(values, clipped, int(row), int(onsets[row]), per_window, policy)
        if segment is None or not _grew(own_ms, segment, offset + segment.begin * group):
            continue
        begin = offset + segment.begin * group
        length = _num_required(segment.effect, noise_of_work, noisy, policy)
        if num_observations - begin < length:
            continue
        found.append(
            Segment(
                row=segment.row, begin=begin, end=num_observations, effect=segment.effect, agreement=segment.agreement,
                noise=segment.noise, peer_spread=segment.peer_spread, ongoing=True, num_required=length,
            )
        )  # fmt: skip
    return sorted(found, key=lambda segment: -segment.effect)


def _num_required(effect: float, noise_of_work: float, noisy: list[tuple[int, float]], policy: ChangePolicy) -> float:
    """Return how many observations must follow the onset: `SHARED.min_steps`, and more if the noise is high."""
    crowded = min(noise_of_work / policy.calm_noise_ratio, SHARED.burst_sigmas * noise_of_work / effect)
    disturbing = (size for size, noise in noisy if SHARED.burst_sigmas * noise / math.sqrt(size) > effect)
    lasting = next((size for size in disturbing if size >= SHARED.min_steps), 0)
    return max(SHARED.min_steps * max(1.0, crowded), policy.lasting_factor * lasting)


def crowding(whole_ms: Matrix) -> float:
    """Noise of a rank's total time of own work in one observation, as a ratio: 0.05 if it typically varies by 5 %.

    Variation that all ranks share is removed first.
    """
    logs = np.log(np.maximum(whole_ms, 1e-6)).astype(np.float64)
    return difference_sigma(logs - np.median(logs, axis=0, keepdims=True))


def steps_for_crowding(noise_of_work: float, policy: StragglerPolicy) -> int:
    """Return how many steps a slowdown must last at a given noise (`crowding`).

    More are required on a busy machine, where a burst of another job lasts up to twenty steps and may affect only one
    phase.
    """
    is_crowded = noise_of_work >= SHARED.doubled_factor * policy.change.calm_noise_ratio
    return policy.persistence.min_length_ended if is_crowded else SHARED.min_steps


def _grouped(excess: Matrix, group: int) -> Floats:
    """Medians of equal groups of observations, counted back from the newest; large groups are sampled evenly."""
    if group == 1:
        return excess.astype(np.float64)
    count = excess.shape[1] // group
    newest = excess[:, excess.shape[1] - count * group :].reshape(len(excess), count, group)
    every = -(-group // _GROUP_SAMPLES)
    return np.median(newest[:, :, ::every], axis=2).astype(np.float64)


def _without_changes(values: Floats, rows: Indices, onsets: Indices) -> Floats:
    """Remove the judged changes, which must not count as noise."""
    flat = values.copy()
    for row in rows:
        onset = int(onsets[row])
        mirrored = [row] if len(values) >= SHARED.many_values else list(range(len(values)))
        flat[mirrored, onset:] -= flat[mirrored, onset:].mean(axis=1, keepdims=True)
        flat[mirrored, :onset] -= flat[mirrored, :onset].mean(axis=1, keepdims=True)
    return flat


def _noise_by_window(values: Floats, sigma: float) -> list[tuple[int, float]]:
    """Return (length, standard deviation x sqrt(length)) of window means: constant for white noise, larger for longer
    windows if disturbances last.
    """
    found = [(1, sigma)]
    for length in (SHARED.block_steps * blocks for blocks in _WINDOWS):
        count = values.shape[1] // length
        if count < 3 or len(values) * (count - 1) < SHARED.history:
            break
        means = values[:, : count * length].reshape(len(values), count, length).mean(axis=2)
        steps = np.abs(np.diff(means, axis=1))
        deviation = difference_sigma(means)
        if steps.size >= 30:  # enough for a 90th percentile, which also counts occasional changes of many ranks
            deviation = max(deviation, float(np.quantile(steps, 0.9)) / 1.645 / math.sqrt(2))
        found.append((length, max(found[-1][1], deviation * math.sqrt(length))))
    return found


def _scaled(per_window: list[tuple[int, float]], length: int) -> float:
    """Noise of a mean over `length` observations, x sqrt(length)."""
    return max(noise for size, noise in per_window if size <= max(length, 1))


def _scan(values: Floats, per_window: list[tuple[int, float]]) -> tuple[Floats, Indices]:
    """Find the largest test statistic of each row over all onsets, and its onset."""
    total = values.shape[1]
    onsets = np.arange(SHARED.history, total - SHARED.min_steps + 1)
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    after = (sums[:, -1:] - sums[:, onsets]) / (total - onsets)
    before = sums[:, onsets] / onsets
    noise = np.array([_uncertainty(per_window, int(onset), total) for onset in onsets])
    statistic = (after - before) / noise
    best = np.argmax(statistic, axis=1)
    return statistic[np.arange(len(values)), best], onsets[best]


def _uncertainty(per_window: list[tuple[int, float]], onset: int, total: int) -> float:
    before, after = _scaled(per_window, onset), _scaled(per_window, total - onset)
    return math.sqrt(before**2 / onset + after**2 / (total - onset))


def _judge(
    values: Floats, clipped: Floats, row: int, onset: int, per_window: list[tuple[int, float]], policy: ChangePolicy
) -> Segment | None:
    """Return the change of a row at an onset as a `Segment`, or None if a test fails.

    The change must be large enough. Nearly all blocks of steps after the onset must be slower than the middle between
    the levels before and after (agreement). The peers must have changed less, and no earlier deviation may come near
    the change (`_precedent`).
    """
    before, after = np.median(values[:, :onset], axis=1), np.median(values[:, onset:], axis=1)
    change = after - before
    effect = float(change[row])
    level = float(before[row]) + effect / 2
    length = values.shape[1] - onset
    block = SHARED.block_steps
    blocks = values[row, onset + length % block :].reshape(-1, block)
    agreement = float(np.mean(np.median(blocks, axis=1) > level))
    others = np.delete(change, row)
    # Of the other ranks' changes, only rises count. If there are few peers, the excess of all others falls when that of
    # one rank grows.
    spread = max(0.0, float(np.max(others)))
    beyond = SHARED.beyond_factor if len(values) >= SHARED.many_values else SHARED.beyond_few_factor
    if effect < policy.min_effect_ratio or agreement < SHARED.agreement_ratio or effect < beyond * spread:
        return None
    if effect < _precedent(clipped, row, onset, length):
        return None
    noise = _uncertainty(per_window, onset, values.shape[1])
    return Segment(row=row, begin=onset, end=values.shape[1], effect=effect, agreement=agreement, noise=noise,
                   peer_spread=spread, ongoing=True, num_required=SHARED.min_steps)  # fmt: skip


def _precedent(values: Floats, row: int, onset: int, length: int) -> float:
    """Return the effect that a change must exceed: a multiple of the largest deviation of a window of similar length.

    A window's deviation is its mean minus the mean of the same rank before the onset. Before the onset, deviations of
    all ranks count in both directions. After it, only rises of the other ranks count.
    """
    length = min(length, max(SHARED.min_steps, onset // 3), 100)
    largest, number = 0.0, 0
    for first, last, without in ((0, onset, -1), (onset, values.shape[1], row)):
        part = values[:, first:last] - values[:, :onset].mean(axis=1, keepdims=True)
        part = part if without < 0 else np.delete(part, without, axis=0)
        count = part.shape[1] // length
        if count and len(part):
            means = part[:, : count * length].reshape(len(part), count, length).mean(axis=2)
            largest, number = (
                max(largest, float(np.abs(means).max() if without < 0 else means.max())),
                number + means.size,
            )
    return largest * (SHARED.beyond_factor if number >= SHARED.history else SHARED.beyond_few_factor)


def _grew(own_ms: Matrix, segment: Segment, begin: int) -> bool:
    """Return True if the rank's own time became longer, rather than its peers' shorter."""
    own = own_ms[segment.row]
    before, after = float(np.median(own[:begin])), float(np.median(own[begin:]))
    return after - before >= SHARED.explained_ratio * segment.effect * before
