"""A measure of rank and step as its excess over the median of the rank's peers in the same step.

    excess = load_excess(store, "own work")     # excess_over_peers(rank_step(...), Places(...)) of a run
    excess.standing_out[0]          # StandingOut(rank=182, first_step=201, value=30.1, ...)

Raw values mostly show what all ranks share: a long step is long on all ranks. The excess shows which rank differs.

1. In each step and pipeline stage, the median of the ranks is subtracted. If the medians are well above the noise, the
   excess is a percentage of the median. Otherwise the excess has the unit of the measure.
2. The noise of a cell combines a rank's changes between columns and the permanent differences between ranks. Both use
   medians of absolute deviations, so that a slow rank does not hide itself.
3. A rank's score is its largest mean excess in any stretch of columns, or its largest rise at any column, divided by
   the standard error.
4. Rows are in mesh order. If there are more ranks than rows, a row shows the mean of its ranks, or the one rank that
   stands out. (The maximum per cell would show only the noise of all its ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.figures.ranks.mesh import load_places
from analyzers.figures.ranks.rank_step import Matrix, rank_step
from analyzers.policy import SHARED
from analyzers.robust import MAD_TO_SIGMA
from analyzers.source import Floats, Ints, Source, ints

__all__ = ["Excess", "Places", "StandingOut", "excess_over_peers", "load_excess"]

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Dimensions of the mesh from the outermost in, as ranks are numbered."""
MAX_ROWS = 256
MAX_NAMED = 5
NAMED_SCORE = 6.0
"""Score from which a rank is named in the figure. With noise only, the largest score of 4,096 ranks is about 4."""
MIN_NAMED_PERCENT = 0.5
"""Minimum excess in percent for naming a rank: in a long run a smaller one is significant too, but costs nothing."""
MIN_SPREAD_RANKS = 8
"""Minimum number of ranks for a spread of their lasting differences."""
MIN_STRETCH = 3
"""Minimum number of columns in which a named rank stands out: a single long step is one bright cell, not a row."""
CLIP_SIGMAS = 4.0
"""Limit of a cell's value, in units of noise, in the search for a stretch."""
PERCENT_SIGMAS = 3.0
"""Minimum median of the peers, in units of noise, for an excess to be shown as a percentage of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Coordinates of ranks in the mesh; a dimension may be missing, as may be all."""

    ranks: Ints
    coordinates: Mapping[str, Ints]

    def of(self, ranks: Ints, name: str) -> Ints:
        """Coordinate of each rank in one dimension; 0 if unknown."""
        known = dict(zip(self.ranks.tolist(), self.coordinates.get(name, np.zeros(0, np.int64)).tolist(), strict=False))
        return np.array([known.get(rank, 0) for rank in ranks.tolist()], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingOut:
    """A rank that is slower than its peers in a range of steps."""

    rank: int
    first_step: int
    last_step: int
    value: float
    """Mean excess in the stretch; for a rise, relative to the rank's excess before it."""
    is_rise: bool
    lasts: bool
    """True if the stretch reaches the last column."""
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """`values[i, j]`: excess of row i from step `steps[j]` on; NaN if it has no peer. In the order of the mesh."""

    ranks: Ints
    """The rank that a row shows; if the row is the mean of several ranks, the first of them."""
    members: Ints
    """Number of ranks over which a row is the mean."""
    steps: Ints
    values: npt.NDArray[np.float64]
    unit: str
    """`%` of the median of the peers, or the unit of the measure."""
    noise: float
    """Standard deviation of a cell without any slow rank, from medians; 0 if all are equal."""
    steps_per_cell: int
    every_steps: int
    standing_out: tuple[StandingOut, ...]
    groups: tuple[tuple[str, int, int], ...]
    """(dimension, coordinate, first row) of the outermost dimension of the mesh that divides the rows."""
    row_of: Mapping[int, int]
    """Row in which each rank is, or would be."""
    named_values: Mapping[int, Floats]
    """The rows of ranks that stand out."""


def load_excess(source: Source, measure: str, *, max_rows: int | None = None) -> Excess:
    """The excess of a measure of `rank_step.MEASURES`; `max_rows`: approximate number of rows that are read."""
    matrix = rank_step(source, measure, max_rows=max_rows, each_rank=True)
    places = load_places(source)
    coordinates = {name: ints(places[name]) for name in (*MESH_ORDER, "node_rank")}
    return excess_over_peers(matrix, Places(ranks=ints(places["rank"]), coordinates=coordinates))


def excess_over_peers(matrix: Matrix, places: Places) -> Excess:
    """The excess of each rank over the median of its pipeline stage in the same step, and the ranks that stand out."""
    stages = places.of(matrix.ranks, "pp")
    medians = _medians(matrix.values, stages)
    values = matrix.values - medians
    noise, lasting = _noise(values)
    unit, typical = matrix.unit, np.nanmedian(np.abs(medians)) if np.isfinite(medians).any() else 0.0
    if typical > 0 and typical > PERCENT_SIGMAS * np.hypot(noise, lasting):
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(medians > 0, 100 * values / medians, np.nan)
        unit = "%"
        noise, lasting = _noise(values)
    # The first steps are not judged. All ranks compile then, and some of them take longer without being slow.
    judged = matrix.steps > SHARED.warm_up_steps
    judged = judged if judged.any() else np.ones(len(matrix.steps), dtype=bool)
    warm = replace(matrix, steps=matrix.steps[judged], values=matrix.values[:, judged])
    score, found = _scores(warm, values[:, judged], noise, lasting)
    found = [one for one in found if unit != "%" or one.value >= MIN_NAMED_PERCENT]
    order = np.lexsort((matrix.ranks, *(places.of(matrix.ranks, name) for name in reversed(MESH_ORDER))))
    parts = _parts(order, stages)
    shown = [part[[np.argmax(score[part])]] if score[part].max() >= NAMED_SCORE else part for part in parts]
    ranks = np.array([matrix.ranks[part[0]] for part in shown], dtype=np.int64)
    outliers = tuple(sorted(found, key=lambda one: -one.score)[:MAX_NAMED])
    place_of = {int(rank): place for place, rank in enumerate(matrix.ranks.tolist())}
    return Excess(
        ranks=ranks, members=np.array([len(part) for part in shown], dtype=np.int64), steps=matrix.steps,
        values=np.array([_mean(values[part]) for part in shown]).reshape(len(parts), len(matrix.steps)), unit=unit,
        noise=float(np.hypot(noise, lasting)), steps_per_cell=matrix.steps_per_cell, every_steps=matrix.every_steps,
        standing_out=outliers, groups=_groups(ranks, places),
        row_of={int(matrix.ranks[place]): row for row, part in enumerate(parts) for place in part},
        named_values={one.rank: values[place_of[one.rank]] for one in outliers},
    )  # fmt: skip


def _medians(values: npt.NDArray[Any], stages: Ints) -> Floats:
    """Median of the stage in each column, for every row; NaN where fewer than two ranks are known."""
    medians = np.full(values.shape, np.nan)
    for stage in np.unique(stages):
        rows = stages == stage
        block = values[rows]
        enough = np.isfinite(block).sum(axis=0) >= 2
        if enough.any():
            medians[np.ix_(rows, enough)] = np.nanmedian(block[:, enough], axis=0)
    return medians


def _noise(values: Floats) -> tuple[float, float]:
    """Standard deviations (of the change from column to column, of the lasting difference between ranks)."""
    changes = np.abs(np.diff(values, axis=1))
    changes = changes[np.isfinite(changes)]
    noise = MAD_TO_SIGMA * float(np.median(changes)) / np.sqrt(2) if len(changes) else 0.0
    of_rank = np.array([np.median(row[np.isfinite(row)]) for row in values if np.isfinite(row).any()])
    if len(of_rank) < MIN_SPREAD_RANKS:
        return noise, 0.0
    return noise, MAD_TO_SIGMA * float(np.median(np.abs(of_rank - np.median(of_rank))))


def _scores(matrix: Matrix, values: Floats, noise: float, lasting: float) -> tuple[Floats, list[StandingOut]]:
    """Score of each rank, and those that stand out in more than a single step."""
    num_rows, num = values.shape
    filled = np.where(np.isfinite(values), values, 0.0)
    # The noise is 0 if all ranks are equal except those that stand out.
    noise = noise or float(np.abs(filled).max(initial=0)) / 1e3
    if not num or noise <= 0:
        return np.zeros(num_rows), []
    most = CLIP_SIGMAS * np.hypot(noise, lasting)  # values are clipped, so that one long step makes no slow range
    sums, clipped = _running(filled), _running(np.clip(filled, -most, most))
    best = filled.max(axis=1) / np.hypot(noise, lasting)
    rows, top, first, last = np.arange(num_rows), np.zeros(num_rows), *np.zeros((2, num_rows), dtype=np.int64)
    is_rise = np.zeros(num_rows, dtype=bool)
    lengths = {num, *(1 << power for power in range(num.bit_length()) if 1 << power <= num)}
    for length in sorted(length for length in lengths if length >= min(num, MIN_STRETCH)):
        score = (clipped[:, length:] - clipped[:, :-length]) / length / np.hypot(noise / np.sqrt(length), lasting)
        at = score.argmax(axis=1)
        better = score[rows, at] > top
        top[better], first[better], last[better] = score[rows, at][better], at[better], at[better] + length - 1
    least = max(MIN_STRETCH, num // 20)
    if num >= 2 * least:  # look for a rise: the rank's earlier excess is subtracted, and with it a lasting difference
        after = np.arange(least, num - least + 1)
        usual = np.median(filled, axis=1, keepdims=True)
        own = _running(np.clip(filled - usual, -CLIP_SIGMAS * noise, CLIP_SIGMAS * noise))
        rise = (own[:, [num]] - own[:, after]) / (num - after) - own[:, after] / after
        score = rise / (noise * np.sqrt(1 / after + 1 / (num - after)))
        at = score.argmax(axis=1)
        is_rise = score[rows, at] > top
        top[is_rise], first[is_rise], last[is_rise] = score[rows, at][is_rise], after[at][is_rise], num - 1
    height = (sums[rows, last + 1] - sums[rows, first]) / (last + 1 - first)
    height -= np.where(is_rise, sums[rows, first] / np.maximum(first, 1), 0)
    found = [
        StandingOut(
            rank=int(matrix.ranks[row]), first_step=int(matrix.steps[first[row]]),
            last_step=int(matrix.steps[last[row]]) + matrix.steps_per_cell - 1, value=float(height[row]),
            is_rise=bool(is_rise[row]), lasts=bool(last[row] == num - 1), score=float(top[row]),
        )
        for row in np.flatnonzero(top >= NAMED_SCORE)
    ]  # fmt: skip
    return np.maximum(best, top), found


def _running(values: Floats) -> Floats:
    """Sums of the first 0, 1, 2, ... columns."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def _parts(order: Ints, stages: Ints) -> list[Ints]:
    """For each row the indices of its ranks in the matrix; all ranks of a row have the same stage."""
    per_row = max(1, -(-len(order) // MAX_ROWS))
    parts: list[Ints] = []
    start = 0
    while start < len(order):
        part = order[start : start + per_row]
        other = np.flatnonzero(stages[part] != stages[part[0]])
        parts.append(part[: other[0]] if len(other) else part)
        start += len(parts[-1])
    return parts


def _mean(values: Floats) -> Floats:
    """Mean of the rows without NaN; NaN where all are NaN."""
    known = np.isfinite(values)
    number = known.sum(axis=0)
    return np.where(number, np.where(known, values, 0).sum(axis=0) / np.maximum(number, 1), np.nan)


def _groups(ranks: Ints, places: Places) -> tuple[tuple[str, int, int], ...]:
    """First row of each part of the outermost dimension that divides the rows; empty if there are many parts."""
    for name in (*MESH_ORDER, "node_rank"):
        of_row = places.of(ranks, name)
        starts = [0, *(np.flatnonzero(np.diff(of_row)) + 1).tolist()] if len(of_row) else []
        if 1 < len(starts) <= 16 and len(starts) == len(np.unique(of_row)):
            return tuple((name, int(of_row[row]), row) for row in starts)
    return ()
