"""A measure of rank and step as its excess over the median of the rank's peers in the same step.

    matrix = excess_over_peers(rank_step(store, "own work"), {0: 0, 1: 0, 2: 1, 3: 1})    # rank -> pipeline stage

Raw values show what every step has in common (a long step is long on all ranks); the excess shows who differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from analyzers.figures.rank_step import Matrix

__all__ = ["excess_over_peers"]


def excess_over_peers(matrix: Matrix, stages: Mapping[int, int]) -> Matrix:
    """The matrix less the median of the ranks of the same stage; NaN where a rank has no peer in that step."""
    values = np.full(matrix.values.shape, np.nan)  # a measure may be whole numbers, which know no NaN
    of_row = np.array([stages.get(int(rank), 0) for rank in matrix.ranks])
    for stage in np.unique(of_row):
        rows = of_row == stage
        block = matrix.values[rows]
        enough = np.isfinite(block).sum(axis=0) >= 2
        if enough.any():
            values[np.ix_(rows, enough)] = block[:, enough] - np.nanmedian(block[:, enough], axis=0)
    return replace(matrix, values=values)
