"""Choice of steps that show where slowdowns start and end, in runs of hundreds of millions of step rows.

    chosen = choose(source, (first, last), num_ranks)
    chosen.ranges               # (first, last, stride) of the steps at which all ranks are to be compared

1. One SQL pass reads every fifth step and takes each rank's minimum own time (without waits) per block of steps. A
   slowdown of a whole block raises the minimum; a single slow step does not.
2. The choice consists of evenly spaced steps, all of the newest steps, and all steps around the largest changes. A
   change is a jump of a rank's time relative to the others, from one block to the next, that exceeds the noise.

A slowdown of two blocks or more (100 steps of 100,000) starts and ends within the chosen steps, unless `MAX_CHANGES`
changes are larger. A shorter slowdown that is over may be missed. `long_run` builds the reduced views from the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.time_classes import OWN_WORK
from analyzers.policy import SHARED
from analyzers.robust import sigma
from analyzers.source import Source

__all__ = ["Chosen", "changes", "choose"]

MAX_CELLS = 30_000_000
"""Maximum pairs of rank and step in one query."""
CHOSEN_ROWS = 4_000_000
"""Approximate number of rows to choose; at least `MIN_STEPS` steps are chosen."""
MIN_STEPS = 1_000
MAX_BLOCKS = 2_000
SAMPLED_EVERY = 5
"""Every fifth step is read in the search for changes."""
FIRST_STEPS = 20
NEWEST_STEPS = 300
AROUND_STEPS = 75
MAX_CHANGES = 6
SIGMAS = 6.0
"""Size from which a change counts, in robust standard deviations of all changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The chosen steps."""

    ranges: tuple[tuple[int, int, int], ...]
    """(first, last, stride) of each range."""
    stride: int
    """Distance between the evenly spaced steps."""
    block: int
    """Number of steps over which each minimum was taken."""


def choose(source: Source, bounds: tuple[int, int], num_ranks: int) -> Chosen:
    """Choose steps of the run from `bounds[0]` to `bounds[1]`."""
    first, last = bounds
    block = max(SAMPLED_EVERY * 2, -(-(last - first + 1) // MAX_BLOCKS))
    changed = _changed_steps(source, bounds, num_ranks, block)
    dense = [(max(first, step - AROUND_STEPS), min(last, step + AROUND_STEPS), 1) for step in changed]
    dense.append((max(first, last - NEWEST_STEPS + 1), last, 1))
    stride = _stride(first, last, dense, max(MIN_STEPS, CHOSEN_ROWS // num_ranks))
    ranges = ((first, min(last, first + FIRST_STEPS), 1), (first, last, stride), *dense)
    return Chosen(ranges=ranges, stride=stride, block=block)


def _stride(first: int, last: int, dense: Sequence[tuple[int, int, int]], target: int) -> int:
    """Return the distance between the evenly spaced steps. With it, these steps and those in `dense` are about `target`
    steps."""
    num_even = max(target - sum(high - low + 1 for low, high, _ in dense), target // 3)
    stride = max(1, (last - first + 1) // num_even)
    while stride > 1 and math.gcd(stride, 10) > 1:  # otherwise work done every 100 steps is sampled always or never
        stride += 1
    return stride


def _changed_steps(source: Source, bounds: tuple[int, int], num_ranks: int, block: int) -> list[int]:
    """First steps of the blocks in which a rank changes most against the others."""
    first, last = bounds
    num_blocks = (last - first) // block + 1
    minima = np.full((num_ranks, num_blocks), np.nan, dtype=np.float32)
    num_steps = block * max(1, MAX_CELLS // (num_ranks * block))
    for low in range(first, last + 1, num_steps):
        table = source.query(
            f"SELECT rank, CAST((step - {first}) // {block} AS INTEGER) AS block, "
            f"CAST(min({OWN_WORK}) AS FLOAT) AS own "
            f"FROM steps WHERE step BETWEEN {low} AND {min(last, low + num_steps - 1)} AND step % {SAMPLED_EVERY} = 0 "
            "AND rank >= 0 AND duration_ns IS NOT NULL GROUP BY ALL"
        )
        minima[np.asarray(table["rank"], dtype=np.int64), np.asarray(table["block"], dtype=np.int64)] = table["own"]
    return [first + number * block for number in changes(minima)]


def changes(minima: npt.NDArray[np.float32]) -> list[int]:
    """Up to `MAX_CHANGES` blocks in which a rank changes most, relative to the median of the ranks.

    `minima`: [ranks, blocks].
    """
    with np.errstate(all="ignore"):
        relative = minima / np.nanmedian(minima, axis=0, keepdims=True)
    relative = np.where(np.isfinite(relative), relative, 1.0).astype(np.float32)
    jumps = np.diff(relative, axis=1)
    if not jumps.size:
        return []
    size = np.abs(jumps)
    ranks, blocks = np.nonzero(size > max(SIGMAS * sigma(jumps, center=0.0), SHARED.min_change_ratio))
    largest_first = np.argsort(-size[ranks, blocks])
    found: list[int] = []
    for block in (blocks[largest_first] + 1).tolist():
        if all(abs(block - other) > 1 for other in found):
            found.append(block)
        if len(found) >= MAX_CHANGES:
            break
    return sorted(found)
