"""Parts of a step's time over the steps, one upon the other: which of them grew, and since when.

figure = draw(steps, [("data", data_ms, PHASE["data"]), ("compute", compute_ms, PHASE["forward"])], y="ms a step")
"""

from __future__ import annotations

from collections.abc import Sequence

from plotly.graph_objects import Figure

from analyzers.figures.focus import mark_onset
from analyzers.figures.theme import new_figure, tint
from analyzers.source import Floats, Ints

__all__ = ["draw"]


def draw(
    step: Ints, parts: Sequence[tuple[str, Floats, str]], *, y: str, onset: float | None = None, height: int = 280
) -> Figure:
    """`parts`: name, milliseconds, colour, from the bottom up. At most some 2,000 steps: nothing is reduced here."""
    figure = new_figure(height=height, x="step", y=y)
    for name, values, colour in parts:
        figure.add_scatter(
            x=step, y=values, mode="lines", stackgroup="all", name=name, line={"width": 0.8, "color": colour},
            fillcolor=tint(colour, 0.55), hovertemplate="step %{x}: %{y:.4g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    mark_onset(figure, onset)
    figure.update_yaxes(rangemode="tozero")
    return figure
