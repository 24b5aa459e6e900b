"""Saves over the steps: how long each took, how long training stood still, which failed, how old the last one is.

figure = draw(columns)              # columns step, tier, duration_ms, stall_ms, state
figure = age(steps, since, due=30)  # steps since the last good save, over the steps
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from analyzers.figures.band import add_line
from analyzers.figures.focus import mark_limit
from analyzers.figures.theme import SEQUENCE, SEVERITY, new_figure
from analyzers.source import Floats, Ints, floats, ints

__all__ = ["age", "draw"]

_PARTS = (
    ("duration_ms", "disk", "until it was on the disk", SEQUENCE[0], "circle"),
    ("stall_ms", "disk", "training stood still, disk", SEQUENCE[1], "diamond"),
    ("stall_ms", "memory", "training stood still, memory", SEQUENCE[3], "square"),
)


def draw(saves: Mapping[str, Any]) -> Figure:
    """A point a save and measure; failed ones are crosses, those that had to wait are open triangles."""
    figure = new_figure(height=320, x="step", y="milliseconds")
    step = ints(saves["step"])
    tier, state = (np.asarray(saves[name], dtype=object).astype(str) for name in ("tier", "state"))
    for column, of, name, colour, symbol in _PARTS:
        values = floats(saves[column])
        rows = np.flatnonzero((tier == of) & np.isfinite(values) & (state != "failed"))
        if len(rows):
            figure.add_scatter(
                x=step[rows], y=values[rows], mode="markers", name=name,
                marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 0}},
                hovertemplate="step %{x}: %{y:,.4g} ms<extra>" + name + "</extra>",
            )  # fmt: skip
    for word, symbol, colour in (("failed", "x", SEVERITY["critical"]), ("delayed", "triangle-up-open", SEQUENCE[5])):
        rows = np.flatnonzero(state == word)
        if len(rows):
            figure.add_scatter(
                x=step[rows], y=np.nan_to_num(floats(saves["duration_ms"])[rows]), mode="markers", name=word,
                marker={"color": colour, "symbol": symbol, "size": 11},
                hovertemplate="step %{x}<extra>" + word + "</extra>",
            )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return figure


def age(step: Ints, since: Floats, *, due: float | None = None) -> Figure:
    """Steps that a failure would cost, at each step; `due`: the distance between saves that was asked for."""
    figure = new_figure(height=260, x="step", y="steps since the last good save", showlegend=False)
    add_line(figure, step, since, name="age", colour=SEQUENCE[0])
    mark_limit(figure, None if due is None else (due, f"due every {due:g} steps"))
    figure.update_yaxes(rangemode="tozero")
    return figure
