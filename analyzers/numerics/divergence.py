"""Slow divergence: a loss that has turned and climbs, with no step that stands out.

    findings = analyze(store)          # kind divergence

1. The loss of each step that was trained in the end (the last time it ran), from the lowest rank that has one.
2. Medians of blocks of `block_steps` steps, counted from step 1, so that live and afterwards they are the same.
3. Diverging at a block: it and the two before rise one after the other, the lowest block lies further back, and the
   rise over that one is both `rise_ratio` and `noise_z` times what the noise of a block's median can do, and no single
   block has most of it. The noise is that of neighbouring steps, which a trend hardly touches.
4. Logarithms are compared. A loss that is not always positive has none, and no size to which a rise could be small: of
   such a loss differences are, and the rise has to be `signed_rise_ratio` of all that its medians have varied before.

A jump that stays is no case for this but a loss spike whose cause is divergence; where the spike analyzer speaks of a
climb, this one is silent.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from analyzers.finding import Finding
from analyzers.numerics import loss_spike
from analyzers.robust import sigma
from analyzers.source import Source, lacking

__all__ = ["DivergencePolicy", "Rise", "analyze", "find_rise"]

_MEDIAN_TO_MEAN = 1.2533  # standard error of a median over that of a mean
_NEIGHBOURS = 256  # newest steps from which the noise is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergencePolicy:
    """When a climb is divergence."""

    block_steps: int = 20
    """Steps of a block: its median is four times quieter than a step, and five blocks see a rise within 100 steps."""
    rising_blocks: int = 3
    """Blocks that rise one after the other, the newest included."""
    rise_ratio: float = 0.08
    """Smallest rise over the lowest block: beyond what an order of the data does to a loss that has flattened."""
    noise_z: float = 6.0
    """Smallest rise in standard errors of a difference of two blocks."""
    signed_rise_ratio: float = 2.0
    """Smallest rise of a loss that is not always positive, over the range of its block medians up to the lowest: such
    objectives wander, but not beyond all that they have been by as much again."""
    signed_blocks: int = 8
    """Blocks from which that range means something."""
    single_block_ratio: float = 0.7
    """Share of the rise that one block may have: a jump that stays is not a climb."""
    whole_ratio: float = 0.8
    """Share of its steps that a block must have to count."""
    since_step: int = 0
    """Only steps from here on (the live view)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A climb: first and last step of it, the medians at its foot and at its top, and the rise in standard errors."""

    first_step: int
    found_step: int
    last_step: int
    low_loss: float
    high_loss: float
    noise_z: float


def analyze(source: Source, policy: DivergencePolicy | None = None) -> list[Finding]:
    """Findings of kind `divergence`, one an attempt at most."""
    policy = policy or DivergencePolicy()
    if lacking(source, steps=("step", "start_ns")):
        return []  # the order of the steps is not known; the spike analyzer says that no loss is recorded
    rows = source.rows(
        """
        SELECT attempt, step, arg_max(loss, start_ns) FROM steps
        WHERE step >= ? AND loss IS NOT NULL AND coalesce(committed, true) AND (attempt, rank) IN
              (SELECT (attempt, min(rank)) FROM steps WHERE loss IS NOT NULL GROUP BY attempt)
        GROUP BY attempt, step ORDER BY attempt, step
        """,
        [policy.since_step],
    )
    losses: dict[int, dict[int, float]] = {}
    for attempt, step, loss in rows:
        if math.isfinite(loss):
            losses.setdefault(attempt, {})[step] = loss
    found = [(attempt, rise) for attempt, own in losses.items() if (rise := find_rise(own, policy)) is not None]
    spikes = _lasting_spikes(source, policy.since_step) if found else []
    return [
        _finding(attempt, rise) for attempt, rise in found if not _is_told(attempt, rise, spikes, policy.block_steps)
    ]


def _lasting_spikes(source: Source, since_step: int) -> list[Finding]:
    findings = loss_spike.analyze(source, loss_spike.LossSpikePolicy(since_step=since_step))
    return [found for found in findings if found.status == "fired" and found.cause in ("divergence", "learning_rate")]


def _is_told(attempt: int, rise: Rise, spikes: Sequence[Finding], reach_steps: int) -> bool:
    return any(
        spike.attempt == attempt
        and (spike.first_step or 0) <= rise.found_step
        and (spike.last_step or 0) >= rise.first_step - reach_steps
        for spike in spikes
    )


def find_rise(losses: Mapping[int, float], policy: DivergencePolicy | None = None) -> Rise | None:
    """The climb of a loss (by step), from where it was certain to as far as it went; None if there is none. Pure."""
    policy = policy or DivergencePolicy()
    is_signed = min(losses.values(), default=1.0) <= 0
    to_scale, from_scale = (float, float) if is_signed else (math.log, math.exp)
    scaled = {step: to_scale(loss) for step, loss in losses.items()}
    blocks = _blocks(scaled, policy)
    if len(blocks) <= policy.rising_blocks:
        return None
    noise = _Noise(scaled, policy, least=1e-9 if is_signed else 1e-4)
    rise: Rise | None = None
    for newest, lowest in enumerate(_lowest_so_far([level for _, level in blocks])):
        if newest < policy.rising_blocks:
            continue
        low = lowest.number
        window = [level for _, level in blocks[newest - policy.rising_blocks + 1 : newest + 1]]
        climbs = all(before < after for before, after in itertools.pairwise(window))
        total = blocks[newest][1] - blocks[low][1]
        least = math.log1p(policy.rise_ratio)
        if is_signed:
            least = policy.signed_rise_ratio * lowest.range_before if low >= policy.signed_blocks else math.inf
        last_step = blocks[newest][0] + policy.block_steps - 1
        if rise is not None and blocks[newest][1] > to_scale(rise.low_loss) + least:
            high = max(rise.high_loss, from_scale(blocks[newest][1]))
            z = total / noise.standard_error(blocks[newest][0])
            rise = Rise(
                first_step=rise.first_step,
                found_step=rise.found_step,
                last_step=last_step,
                low_loss=rise.low_loss,
                high_loss=high,
                noise_z=max(rise.noise_z, z),
            )
        elif (
            rise is None
            and climbs
            and newest - low >= policy.rising_blocks - 1
            and lowest.largest_rise <= policy.single_block_ratio * total
            and total >= least
            and (z := total / noise.standard_error(blocks[newest][0])) >= policy.noise_z
        ):
            rise = Rise(
                first_step=blocks[low][0] + policy.block_steps,
                found_step=last_step,
                last_step=last_step,
                low_loss=from_scale(blocks[low][1]),
                high_loss=from_scale(blocks[newest][1]),
                noise_z=z,
            )
    return rise


def _blocks(losses: Mapping[int, float], policy: DivergencePolicy) -> list[tuple[int, float]]:
    """(first step, median) of each block that is whole enough, in order; of logarithms where the losses have them."""
    members: dict[int, list[float]] = {}
    for step, loss in losses.items():
        members.setdefault((step - 1) // policy.block_steps, []).append(loss)
    whole = policy.whole_ratio * policy.block_steps
    newest = max(losses, default=0)
    return [
        (number * policy.block_steps + 1, median(own))
        for number, own in sorted(members.items())
        if len(own) >= whole and (number + 1) * policy.block_steps <= newest
    ]


@dataclass(frozen=True, slots=True)
class _Lowest:
    """The lowest block up to a block."""

    number: int
    largest_rise: float
    """From one block to the next since then; 0 if it is the newest."""
    range_before: float
    """Highest less lowest level up to it."""


def _lowest_so_far(levels: Sequence[float]) -> Iterator[_Lowest]:
    """For each block; in one pass, since a long run has thousands of them."""
    number, largest, highest, span = 0, 0.0, -math.inf, 0.0
    for newest, level in enumerate(levels):
        highest = max(highest, level)
        if newest == 0 or level < levels[number]:
            number, largest, span = newest, 0.0, highest - level
        else:
            largest = max(largest, level - levels[newest - 1])
        yield _Lowest(number, largest, span)


class _Noise:
    """The noise of a loss (by step) between neighbours, up to any of its blocks."""

    def __init__(self, losses: Mapping[int, float], policy: DivergencePolicy, *, least: float) -> None:
        self._steps = sorted(losses)
        self._losses = np.array([losses[step] for step in self._steps])
        self._block_steps, self._least = policy.block_steps, least

    def standard_error(self, first_step: int) -> float:
        """Of the difference of the medians of two blocks, as it is in the block from `first_step` on."""
        end = bisect.bisect_left(self._steps, first_step + self._block_steps)
        changes = np.diff(self._losses[max(0, end - _NEIGHBOURS) : end])
        if not len(changes):
            return math.inf
        spread = sigma(changes) / math.sqrt(2)
        # Content is alike over a few steps: neighbours differ by less than steps far apart, hence the factor two.
        return max(self._least, 2.0 * spread * _MEDIAN_TO_MEAN * math.sqrt(2 / self._block_steps))


def _finding(attempt: int, rise: Rise) -> Finding:
    ratio = rise.high_loss / rise.low_loss - 1 if rise.low_loss > 0 else None
    share = "" if ratio is None else f" (+{100 * ratio:.0f} %)"
    return Finding(
        analyzer="divergence",
        kind="divergence",
        severity="warning",
        status="fired",
        first_step=rise.first_step,
        last_step=rise.last_step,
        cause="trend",
        summary=(
            f"the loss climbs from {rise.low_loss:.3f} to {rise.high_loss:.3f}{share} over steps "
            f"{rise.first_step} to {rise.last_step}, with no single step to blame"
        ),
        evidence={
            "loss_lowest": round(rise.low_loss, 5),
            "loss_highest": round(rise.high_loss, 5),
            "loss_rise_ratio": None if ratio is None else round(ratio, 4),
            "rise_z": round(rise.noise_z, 1),
            "certain_at_step": rise.found_step,
        },
        advice="divergence",
        attempt=attempt,
    )
