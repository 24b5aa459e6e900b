"""Communication of a step that nothing hides, and what computation hid: milliseconds over the steps.

figure = draw(step, transfer_ms, late_ms, overlapped_ms)
"""

from __future__ import annotations

from plotly.graph_objects import Figure

from ...source import Floats, Ints
from .theme import CATEGORY, SEQUENCE, new_figure, tint

__all__ = ["draw"]


def draw(step: Ints, transfer_ms: Floats, late_ms: Floats, overlapped_ms: Floats) -> Figure:
    """Mean over the ranks, stacked: what a step would be shorter without is at the bottom. At most 2,000 steps."""
    figure = new_figure(height=280, x="step", y="communication (ms, mean of the ranks)")
    parts = (
        (transfer_ms, "exposed: data travel", CATEGORY["communication"]),
        (late_ms, "exposed: waiting for the last", CATEGORY["straggler"]),
        (overlapped_ms, "hidden behind computation", SEQUENCE[7]),
    )
    for values, name, colour in parts:
        figure.add_scatter(
            x=step, y=values, mode="lines", stackgroup="all", name=name, line={"width": 0.8, "color": colour},
            fillcolor=tint(colour, 0.55), hovertemplate="step %{x}: %{y:.4g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return figure
