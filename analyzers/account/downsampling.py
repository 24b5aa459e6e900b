"""Choice of steps that show where slowdowns begin and end, in runs of hundreds of millions of step rows.

    chosen = choose(source, (first, last), num_ranks)
    chosen.ranges               # (first, last, stride) of the steps at which all ranks are to be compared

1. One SQL pass over all rows takes each rank's minimum own time (without waits) in each block of steps, from every
   fifth step. A single slow step doesn't raise the minimum, a slowdown of a whole block does.
2. It chooses evenly spaced steps, all of the newest steps, and all steps around each change of a rank against the
   others and its own past that exceeds the noise.

The chosen steps hold the start and the end of any slowdown of two blocks or more (100 steps of 100,000). A shorter one
that is over may be missed. `long_run` builds the reduced views from them.
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
"""Pairs of rank and step that one query groups."""
CHOSEN_ROWS = 4_000_000
"""Rows to choose, but at least `MIN_STEPS` steps."""
MIN_STEPS = 1_000
MAX_BLOCKS = 2_000
EVERY = 5
NEWEST_STEPS = 300
AROUND_STEPS = 75
MAX_EDGES = 6
SIGMAS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`stride`: distance of the evenly spaced steps; `block`: steps over which a rank's minimum was taken."""

    ranges: tuple[tuple[int, int, int], ...]
    stride: int
    block: int


def choose(source: Source, bounds: tuple[int, int], num_ranks: int) -> Chosen:
    """Look for changes in all steps from the first to the last of `bounds`."""
    first, last = bounds
    block = max(EVERY * 2, -(-(last - first + 1) // MAX_BLOCKS))
    edges = _edges(source, bounds, num_ranks, block)
    ranges = _ranges(first, last, edges, max(MIN_STEPS, CHOSEN_ROWS // num_ranks))
    return Chosen(ranges=tuple(ranges), stride=ranges[1][2], block=block)


def _ranges(first: int, last: int, edges: Sequence[int], number: int) -> list[tuple[int, int, int]]:
    """(first, last, stride) of ranges of steps, about `number` steps in all."""
    dense = [(max(first, edge - AROUND_STEPS), min(last, edge + AROUND_STEPS), 1) for edge in edges]
    dense.append((max(first, last - NEWEST_STEPS + 1), last, 1))
    left = max(number - sum(high - low + 1 for low, high, _ in dense), number // 3)
    stride = max(1, (last - first + 1) // left)
    while stride > 1 and math.gcd(stride, 10) > 1:  # else periodic work (every 100 steps) is always or never sampled
        stride += 1
    return [(first, min(last, first + 20), 1), (first, last, stride), *dense]


def _edges(source: Source, bounds: tuple[int, int], num_ranks: int, block: int) -> list[int]:
    """Steps at which a rank changes against the others: the largest changes of all ranks."""
    first, last = bounds
    num_blocks = (last - first) // block + 1
    least = np.full((num_ranks, num_blocks), np.nan, dtype=np.float32)
    num_steps = block * max(1, MAX_CELLS // (num_ranks * block))
    for low in range(first, last + 1, num_steps):
        table = source.query(
            f"SELECT rank, CAST((step - {first}) // {block} AS INTEGER) AS block, "
            f"CAST(min({OWN_WORK}) AS FLOAT) AS own "
            f"FROM steps WHERE step BETWEEN {low} AND {min(last, low + num_steps - 1)} AND step % {EVERY} = 0 "
            "AND rank >= 0 AND duration_ns IS NOT NULL GROUP BY ALL"
        )
        least[np.asarray(table["rank"], dtype=np.int64), np.asarray(table["block"], dtype=np.int64)] = table["own"]
    return [first + place * block for place in changes(least)]


def changes(least: npt.NDArray[np.float32]) -> list[int]:
    """Columns at which a row rises or falls against the median row and its own former level. Pure."""
    with np.errstate(all="ignore"):
        relative = least / np.nanmedian(least, axis=0, keepdims=True)
    relative = np.where(np.isfinite(relative), relative, 1.0).astype(np.float32)
    steps = np.diff(relative, axis=1)
    if not steps.size:
        return []
    height = np.abs(steps)
    rows, columns = np.nonzero(height > max(SIGMAS * sigma(steps, center=0.0), SHARED.min_change_ratio))
    order = np.argsort(-height[rows, columns])
    found: list[int] = []
    for place in columns[order].tolist():
        if all(abs(place + 1 - other) > 1 for other in found):
            found.append(place + 1)
        if len(found) >= MAX_EDGES:
            break
    return sorted(found)
