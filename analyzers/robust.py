"""Robust statistics: median, spread and z-score that a few outliers do not move.

    spread = sigma(values)                   # 1.4826 x the median absolute deviation
    robust_z(9.0, values)                    # how many spreads a value lies above the median
    difference_sigma(series)                  # noise of a series whose level may drift

For normally distributed values `sigma` estimates their standard deviation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.guard.signed_loss import MAD_TO_SIGMA

__all__ = ["MAD_TO_SIGMA", "difference_sigma", "median", "robust_z", "sigma"]


def median(values: npt.ArrayLike) -> float:
    """Median; NaN without values."""
    own = np.asarray(values)
    return float(np.median(own)) if own.size else math.nan


def sigma(values: npt.ArrayLike, *, center: float | None = None) -> float:
    """Spread of all values around `center`, by default their median; NaN without values."""
    own: npt.NDArray[Any] = np.asarray(values)
    return MAD_TO_SIGMA * median(np.abs(own - (median(own) if center is None else center)))


def difference_sigma(values: npt.ArrayLike, *, axis: int = -1) -> float:
    """Spread of one value, from the differences of neighbours along an axis: a drift or a step hardly changes it."""
    return sigma(np.diff(np.asarray(values), axis=axis), center=0.0) / math.sqrt(2)


def robust_z(value: float, values: npt.ArrayLike, *, min_sigma: float = 1e-12) -> float:
    """Distance of a value from the median of `values`, in their spreads, which count as `min_sigma` at least."""
    return (value - median(values)) / max(sigma(values), min_sigma)
