"""Robust statistics: median and spread that a few outliers do not move.

    spread = sigma(values)                   # 1.4826 x the median absolute deviation
    difference_sigma(series)                  # noise of a series whose level may drift
    others_median(complete(own_ms))          # matrix rank x observation: the median of the other ranks

For normally distributed values `sigma` estimates their standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from probes.guard.signed_loss import MAD_TO_SIGMA

__all__ = ["MAD_TO_SIGMA", "complete", "difference_sigma", "median_or_nan", "others_median", "sigma"]

Matrix = npt.NDArray[np.float32]
Float = TypeVar("Float", np.float32, np.float64)


def median_or_nan(values: npt.ArrayLike) -> float:
    """Median; NaN without values."""
    array = np.asarray(values)
    return float(np.median(array)) if array.size else math.nan


def sigma(values: npt.ArrayLike, *, center: float | None = None) -> float:
    """Spread of all values around `center`, by default their median; NaN without values."""
    array: npt.NDArray[Any] = np.asarray(values)
    return MAD_TO_SIGMA * median_or_nan(np.abs(array - (median_or_nan(array) if center is None else center)))


def difference_sigma(values: npt.ArrayLike) -> float:
    """Spread of single values, estimated from the differences of neighbours on the last axis, so that a drift or a step
    hardly changes it."""
    return sigma(np.diff(np.asarray(values)), center=0.0) / math.sqrt(2)


def others_median(values: npt.NDArray[Float]) -> npt.NDArray[Float]:
    """For each rank (row) and observation the median of the *other* rows: a slow rank is not compared with itself.

    Needs two rows or more. It is computed from the order statistics around the middle, without sorting once per rank.
    """
    num = len(values)
    half = num // 2
    if num % 2 == 0:
        low, high = np.partition(values, (half - 1, half), axis=0)[half - 1 : half + 1]
        even: npt.NDArray[Float] = np.where(values >= high, low, high)
        return even
    low, middle, high = np.partition(values, (half - 1, half, half + 1), axis=0)[half - 1 : half + 2]
    below, above, around = (middle + high) / 2, (low + middle) / 2, (low + high) / 2
    odd: npt.NDArray[Float] = np.where(values > middle, above, np.where(values < middle, below, around))
    return odd


def complete(values: Matrix, groups: Sequence[npt.NDArray[np.int64]] | None = None) -> Matrix:
    """Replace missing values (NaN) by neutral ones: the median of the other ranks in this observation, or, if none has
    a value, the rank's median over all observations. `groups`: rows of ranks with the same work; None: all ranks.
    """
    holes = np.isnan(values)
    if not holes.any():
        return values
    filled = values.copy()
    for rows in [np.arange(len(values))] if groups is None else groups:
        part, missing = values[rows], holes[rows]
        for column in np.flatnonzero(missing.any(axis=0)):
            present = part[~missing[:, column], column]
            if len(present):
                filled[rows[missing[:, column]], column] = np.median(present)
        for row in rows[np.isnan(filled[rows]).any(axis=1)]:
            own = values[row, ~holes[row]]
            filled[row, np.isnan(filled[row])] = np.median(own) if len(own) else 0.0
    return filled
