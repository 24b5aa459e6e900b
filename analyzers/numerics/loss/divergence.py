"""Slow divergence: a loss that has turned and climbs, without a step that stands out.

1. The loss of each committed step (the last time it ran), from the lowest rank that has one.
2. Take medians of blocks of `block_steps` steps, counted from step 1, so that live and post-mortem blocks are the same.
3. The loss diverges at a block under four conditions: the last three blocks rise in succession, the lowest block is
   earlier, the rise above the lowest block exceeds both `rise_ratio` and `certain_sigmas` times the noise of a block's
   median, and no single block accounts for most of the rise. The noise is estimated from the differences of
   neighbouring steps, which a trend hardly affects.
4. Logarithms are compared. A loss that is not always positive has no logarithm and no natural scale: its differences
   are compared, and the rise must be `beyond_few_factor` times the range of its medians up to the lowest one.

Attempts that train a policy are not judged, because their loss does not measure progress (`numerics.policy_loss`).

A jump that stays is a loss spike with cause divergence. A climb that such a spike explains is not reported again.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from analyzers.finding import Finding
from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.policy import DivergencePolicy
from analyzers.numerics.policy_loss import policy_attempts
from analyzers.policy import SHARED
from analyzers.robust import sigma
from analyzers.run.records.trainings import training_starts
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import loss_text, rise_text

__all__ = ["Rise", "divergence", "find_rise", "rise_finding"]

_MEDIAN_TO_MEAN = 1.2533  # standard error of a median / standard error of a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A climb of the loss: its steps, the lowest and the highest median, and the rise in standard errors."""

    first_step: int
    found_step: int
    last_step: int
    low_loss: float
    high_loss: float
    noise_z: float


def divergence(source: Source, scope: Scope, policy: DivergencePolicy = DivergencePolicy()) -> list[Finding]:
    """Findings of kind `divergence`, at most one per training of an attempt."""
    if lacking(source, steps=("step", "loss")):
        return []  # the check for loss spikes reports that no loss is recorded
    rows = source.rows(
        """
        SELECT attempt, step, arg_max(loss, coalesce(start_ns, 0)) FROM steps
        WHERE step >= ? AND attempt = coalesce(?, attempt) AND loss IS NOT NULL AND coalesce(committed, true)
          AND (attempt, rank) IN (SELECT (attempt, min(rank)) FROM steps WHERE loss IS NOT NULL GROUP BY attempt)
        GROUP BY attempt, step ORDER BY attempt, step
        """,
        [scope.since_step, scope.attempt],
    )
    losses: dict[int, dict[int, float]] = {}
    policies = policy_attempts(source) if rows else set()
    for attempt, step, loss in rows:
        if math.isfinite(loss) and attempt not in policies:
            losses.setdefault(attempt, {})[step] = loss
    starts = training_starts(source) if rows else set()
    found = [
        (attempt, rise)
        for attempt, by_step in losses.items()
        for series in _series(by_step, {step for started, step in starts if started == attempt})
        if (rise := find_rise(series, policy)) is not None
    ]
    spikes = loss_spikes(source, scope) if found else []
    lasting = [
        spike
        for spike in spikes
        if spike.status == "fired"
        and (spike.cause in ("divergence", "learning_rate") or {"recovered_step", "loss_after"} & {*spike.evidence})
    ]
    return [
        rise_finding(attempt, rise)
        for attempt, rise in found
        if not any(_explains(spike, attempt, rise, policy.block_steps) for spike in lasting)
    ]


def _series(losses: Mapping[int, float], starts: Collection[int]) -> Iterator[dict[int, float]]:
    """The losses of each training of an attempt."""
    edges = sorted(starts)
    for _, steps in itertools.groupby(losses, lambda step: bisect.bisect_right(edges, step)):
        yield {step: losses[step] for step in steps}


def _explains(spike: Finding, attempt: int, rise: Rise, reach_steps: int) -> bool:
    """True if a lasting spike explains the climb."""
    return (
        spike.attempt == attempt
        and (spike.first_step or 0) <= rise.found_step
        and (spike.last_step or 0) >= rise.first_step - reach_steps
    )


def find_rise(losses: Mapping[int, float], policy: DivergencePolicy = DivergencePolicy()) -> Rise | None:
    """Find the climb of a loss, given by step: from the block after the lowest one to the end of the climb, once it is
    certain. None if there is no climb."""
    is_signed = min(losses.values(), default=1.0) <= 0
    to_scale, from_scale = (float, float) if is_signed else (math.log, math.exp)
    scaled = {step: to_scale(loss) for step, loss in losses.items()}
    blocks = _blocks(scaled, policy)
    if len(blocks) <= SHARED.min_times:
        return None
    noise = _Noise(scaled, policy)
    rise: Rise | None = None
    for newest, lowest in enumerate(_lowest_so_far([level for _, level in blocks])):
        if newest < SHARED.min_times:
            continue
        first_step, level = blocks[newest]
        total = level - blocks[lowest.number][1]
        last_step = first_step + policy.block_steps - 1
        least = _least_rise(lowest, policy, is_signed=is_signed)
        if rise is not None and level > to_scale(rise.low_loss) + least:
            high, z = max(rise.high_loss, from_scale(level)), total / noise.standard_error(first_step)
            rise = replace(rise, last_step=last_step, high_loss=high, noise_z=max(rise.noise_z, z))
        elif rise is None and total >= least and _climbs(blocks, newest, lowest):
            z = total / noise.standard_error(first_step)
            if z < SHARED.certain_sigmas:
                continue
            rise = Rise(
                first_step=blocks[lowest.number][0] + policy.block_steps,
                found_step=last_step,
                last_step=last_step,
                low_loss=from_scale(blocks[lowest.number][1]),
                high_loss=from_scale(level),
                noise_z=z,
            )
    return rise


def _least_rise(lowest: _Lowest, policy: DivergencePolicy, *, is_signed: bool) -> float:
    """Smallest rise above the lowest block that counts, in the scale of the blocks."""
    if not is_signed:
        return math.log1p(policy.rise_ratio)
    return SHARED.beyond_few_factor * lowest.range_before if lowest.number >= SHARED.many_values else math.inf


def _climbs(blocks: Sequence[tuple[int, float]], newest: int, lowest: _Lowest) -> bool:
    """True if the newest blocks rise one after the other, and no single block has most of the rise."""
    window = [level for _, level in blocks[newest - SHARED.min_times + 1 : newest + 1]]
    total = window[-1] - blocks[lowest.number][1]
    return (
        all(before < after for before, after in itertools.pairwise(window))
        and newest - lowest.number >= SHARED.min_times - 1
        and lowest.largest_rise <= SHARED.agreement_ratio * total
    )


def _blocks(losses: Mapping[int, float], policy: DivergencePolicy) -> list[tuple[int, float]]:
    """Return (first step, median) of each block that is complete enough, in order."""
    members: dict[int, list[float]] = {}
    for step, loss in losses.items():
        members.setdefault((step - 1) // policy.block_steps, []).append(loss)
    whole = SHARED.agreement_ratio * policy.block_steps
    newest = max(losses, default=0)
    return [
        (number * policy.block_steps + 1, median(block))
        for number, block in sorted(members.items())
        if len(block) >= whole and (number + 1) * policy.block_steps <= newest
    ]


@dataclass(frozen=True, slots=True)
class _Lowest:
    """The lowest block among a block and all blocks before it."""

    number: int
    largest_rise: float
    """Largest rise between successive blocks after the lowest one; 0 if the lowest block is the newest."""
    range_before: float
    """Highest minus lowest level up to that block."""


def _lowest_so_far(levels: Sequence[float]) -> Iterator[_Lowest]:
    """For each block, the lowest block up to it. Computed in one pass, because a long run has thousands of blocks."""
    number, largest, highest, span = 0, 0.0, -math.inf, 0.0
    for newest, level in enumerate(levels):
        highest = max(highest, level)
        if newest == 0 or level < levels[number]:
            number, largest, span = newest, 0.0, highest - level
        else:
            largest = max(largest, level - levels[newest - 1])
        yield _Lowest(number, largest, span)


class _Noise:
    """Noise of a loss, estimated from differences of neighbouring steps, at any block of the run."""

    def __init__(self, losses: Mapping[int, float], policy: DivergencePolicy) -> None:
        self._steps = sorted(losses)
        self._losses = np.array([losses[step] for step in self._steps])
        self._policy = policy

    def standard_error(self, first_step: int) -> float:
        """Standard error of the difference between two block medians, for the block that begins at `first_step`."""
        end = bisect.bisect_left(self._steps, first_step + self._policy.block_steps)
        changes = np.diff(self._losses[max(0, end - self._policy.noise_steps) : end])
        if not len(changes):
            return math.inf
        spread = sigma(changes) / math.sqrt(2)
        # Neighbouring steps train on similar content and differ by less than distant steps, hence the factor of two.
        return max(1e-9, 2.0 * spread * _MEDIAN_TO_MEAN * math.sqrt(2 / self._policy.block_steps))


def rise_finding(attempt: int, rise: Rise) -> Finding:
    """The finding on a climb; `rise.noise_z` is NaN if there are too few losses to estimate their noise."""
    ratio = rise.high_loss / rise.low_loss - 1 if rise.low_loss > 0 else None
    share = "" if ratio is None else f" ({rise_text(ratio)})"
    return Finding(
        analyzer="divergence",
        kind="divergence",
        severity="warning",
        status="fired",
        first_step=rise.first_step,
        last_step=rise.last_step,
        cause="trend",
        summary=(
            f"The loss climbed from {loss_text(rise.low_loss)} to {loss_text(rise.high_loss)}{share} over steps "
            f"{rise.first_step} to {rise.last_step}{'' if math.isnan(rise.noise_z) else ', without a single spike'}."
        ),
        evidence={
            "loss_lowest": round(rise.low_loss, 5),
            "loss_highest": round(rise.high_loss, 5),
            "loss_rise_ratio": None if ratio is None else round(ratio, 4),
            "rise_z": None if math.isnan(rise.noise_z) else round(rise.noise_z, 1),
            "certain_at_step": rise.found_step,
        },
        advice="divergence",
        attempt=attempt,
    )
