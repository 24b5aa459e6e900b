"""Spread and median of many ranks as a band and a line, for all figures that compare one rank with many.

    add_band(figure, steps, low, middle, high, name="10th to 90th percentile", median="median of the ranks")

Both edges of the band are downsampled at the same points, so that they never cross; the median is downsampled
separately.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.figures.drawing.reduce import extremes
from analyzers.figures.drawing.theme import SEQUENCE, tint
from analyzers.source import Floats

__all__ = ["add_band", "add_line"]

MAX_EDGE_POINTS = 2_000


def add_band(
    figure: Figure,
    at: npt.NDArray[Any],
    low: Floats,
    middle: Floats,
    high: Floats,
    *,
    name: str,
    median: str,
    **line: Any,
) -> None:
    """`low`, `middle`, `high` over `at`, in the unit of the axis; `line` goes to `add_line` for the median."""
    keep = extremes(high, MAX_EDGE_POINTS)
    common: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    figure.add_scatter(x=at[keep], y=low[keep], showlegend=False, **common)
    figure.add_scatter(x=at[keep], y=high[keep], fill="tonexty", fillcolor=tint(SEQUENCE[0], 0.2), name=name, **common)
    add_line(figure, at, middle, name=median, colour=SEQUENCE[0], **line)


def add_line(
    figure: Figure,
    at: npt.NDArray[Any],
    values: Floats,
    *,
    name: str,
    colour: str,
    width: float = 1.6,
    dash: str = "solid",
    hover: str = "%{x}: %{y:,.5g}",
    **trace: Any,
) -> None:
    """Add one downsampled line; `hover` is Plotly's hover template for a point, without the name."""
    keep = extremes(values)
    figure.add_scatter(
        x=at[keep], y=values[keep], mode="lines", name=name, line={"color": colour, "width": width, "dash": dash},
        hovertemplate=f"{hover}<extra>{name}</extra>", **trace,
    )  # fmt: skip
