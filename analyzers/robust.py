"""Robust statistics: median and spread that a few outliers do not move.

    spread = sigma(values)                   # 1.4826 x the median absolute deviation
    difference_sigma(series)                  # noise of a series whose level may drift
    others_median(complete(own_ms))          # matrix rank x observation: the median of the other ranks

For normally distributed values `sigma` estimates their standard deviation.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from probes.guard.signed_loss import MAD_TO_SIGMA

__all__ = [
    "MAD_TO_SIGMA", "complete", "difference_sigma", "median_or_nan", "others_median", "sigma",
    "with_median_rest",
]  # fmt: skip

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


def complete(values: Matrix) -> Matrix:
    """Replace missing values (NaN) by the median of the other ranks, which is neutral."""
    holes = np.isnan(values)
    if not holes.any():
        return values
    columns = np.flatnonzero(holes.any(axis=0))
    filled = values.copy()
    for column in columns:
        present = values[~holes[:, column], column]
        filled[holes[:, column], column] = np.median(present) if len(present) else 0.0
    return filled


def with_median_rest(values: Matrix, total: Matrix) -> Matrix:
    """Add to `values`, the work in one phase or gap, each rank's usual work in the rest of the step. The result has the
    level of a whole step, but only the noise of this place. `total`: work in the whole step. Shapes (ranks, steps)."""
    rest = np.median(total, axis=1, keepdims=True) - np.median(values, axis=1, keepdims=True)
    with_rest: Matrix = values + np.maximum(rest, 0.0)
    return with_rest
