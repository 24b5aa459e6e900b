"""Fewer points with the same picture: the extremes of each piece of a line are kept, exactly.

    keep = extremes(loss, 5000)        # indices, in order
    figure.add_scatter(x=step[keep], y=loss[keep])

A line of more points than the screen has columns shows the least and the largest value in each column. Those two are
kept of every piece, and the first and the last point of all; so no spike is ever lost, which an average would do.
NaNs that were recorded are kept where they begin and end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analyzers.source import Floats

__all__ = ["MAX_POINTS", "extremes"]

MAX_POINTS = 5_000
"""Points of one trace."""


def extremes(values: Floats, limit: int = MAX_POINTS) -> npt.NDArray[np.int64]:
    """Indices of at most `limit` points of a line that look like all of them."""
    num = len(values)
    if num <= limit:
        return np.arange(num)
    pieces = np.array_split(np.arange(num), max(1, (limit - 2) // 3))
    kept = {0, num - 1}
    for piece in pieces:
        part = values[piece]
        finite = np.isfinite(part)
        if not finite.all():
            kept.add(int(piece[int(np.argmin(finite))]))  # the first that is none: a gap stays a gap
        if finite.any():
            kept.add(int(piece[int(np.nanargmin(np.where(finite, part, np.nan)))]))
            kept.add(int(piece[int(np.nanargmax(np.where(finite, part, np.nan)))]))
    return np.array(sorted(kept), dtype=np.int64)
