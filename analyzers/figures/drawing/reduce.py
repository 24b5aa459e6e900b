"""Downsample a line without changing how it looks: keep the exact extremes of each piece.

    keep = extremes(loss, 5000)        # indices, in order
    figure.add_scatter(x=step[keep], y=loss[keep])

On a screen, a line with more points than pixel columns shows only the smallest and largest value of each column. These
two are kept for each piece, with the first and last point of the line. So no spike is lost, as it would be by
averaging. Each piece also keeps its first NaN, so that a gap stays visible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analyzers.source import Floats

__all__ = ["MAX_POINTS", "extremes"]

MAX_POINTS = 5_000
"""Default for the maximum number of points in a trace."""


def extremes(values: Floats, limit: int = MAX_POINTS) -> npt.NDArray[np.int64]:
    """Indices of at most `limit` points of a line that draw the same picture as all of them."""
    num = len(values)
    if num <= limit:
        return np.arange(num)
    pieces = np.array_split(np.arange(num), max(1, (limit - 2) // 3))
    kept = {0, num - 1}
    for piece in pieces:
        part = values[piece]
        finite = np.isfinite(part)
        if not finite.all():
            kept.add(int(piece[int(np.argmin(finite))]))  # the first NaN of the piece
        if finite.any():
            kept.add(int(piece[int(np.nanargmin(np.where(finite, part, np.nan)))]))
            kept.add(int(piece[int(np.nanargmax(np.where(finite, part, np.nan)))]))
    return np.array(sorted(kept), dtype=np.int64)
