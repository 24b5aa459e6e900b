"""Named lines over steps or time on one axis, each downsampled to what a screen shows.

figure = draw([Series(name="rank 3", x=steps, y=ms)], x="step", y="step time (ms)")
figure = band(steps, low, middle, high, x="step", y="memory (MiB)")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.figures.drawing.band import add_band, add_line
from analyzers.figures.drawing.reduce import extremes
from analyzers.figures.drawing.theme import DASHES, SEQUENCE, label, new_figure
from analyzers.source import Floats

__all__ = ["Series", "band", "draw"]

MAX_LINES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line; `x` are steps or datetimes, `y` is NaN if there is no value."""

    name: str
    x: npt.NDArray[Any]
    y: Floats
    colour: str = ""


def draw(
    lines: Sequence[Series], *, x: str, y: str, height: int = 300, from_zero: bool = False, log: bool = False
) -> Figure:
    """Draw at most `MAX_LINES` lines, in the given order."""
    figure = new_figure(height=height, x=x, y=y)
    for number, line in enumerate(lines[:MAX_LINES]):
        keep = extremes(line.y)
        name = label(line.name, 40)
        single = np.isfinite(line.y).sum() == 1
        figure.add_scatter(
            x=line.x[keep], y=line.y[keep], name=name, mode="markers" if single else "lines",
            line={
                "color": line.colour or SEQUENCE[number % len(SEQUENCE)], "width": 1.6,
                "dash": "solid" if line.colour else DASHES[number // len(SEQUENCE) % len(DASHES)],
            },
            hovertemplate="%{x}: %{y:,.5g}<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_layout(showlegend=len(lines) > 1)
    figure.update_yaxes(rangemode="tozero" if from_zero else "normal", type="log" if log else "linear")
    if log:
        figure.update_yaxes(exponentformat="power", dtick=1)
    return figure


def band(
    at: npt.NDArray[Any], low: Floats, middle: Floats, high: Floats, *, x: str, y: str, height: int = 300
) -> Figure:
    """Draw the minimum, median and maximum of many ranks."""
    figure = new_figure(height=height, x=x, y=y)
    add_band(figure, at, low, middle, high, name="all ranks", median="median")
    add_line(figure, at, high, name="largest", colour=SEQUENCE[1])
    figure.update_yaxes(rangemode="tozero")
    return figure
