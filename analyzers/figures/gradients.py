"""Gradients by parameter and step: their norms, and where they were not finite.

norms(columns)          # columns parameter, step, norm, nonfinite
nonfinite(columns)      # columns parameter, step, nonfinite

Parameters are in model order from top to bottom. The colour scale of norms is logarithmic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import HEAT, SEVERITY, label, new_figure
from analyzers.source import Floats, floats, ints

__all__ = ["MAX_PARAMETERS", "nonfinite", "norms"]

MAX_PARAMETERS = 200
MIN_SPAN = 20
"""Minimum range of steps for a numeric axis. With a smaller range, the axis would show fractions of steps."""
_NUMBER = re.compile(r"(\d+)")


def norms(table: Mapping[str, Any]) -> Figure:
    """Heatmap of log10 of the L2 norm; a cell is empty if the norm was not measured or 0."""
    names, steps, grid = _grid(table, "norm")
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log10(np.where(grid > 0, grid, np.nan))
    figure = _map(names, steps)
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (-1.0, 0.0)
    ticks = list(range(int(np.floor(low)), int(np.ceil(high)) + 1))
    figure.add_heatmap(
        x=[str(step) for step in steps], y=names, z=np.round(shown, 3), customdata=grid, colorscale=HEAT, zmin=low,
        zmax=max(high, low + 0.1), hovertemplate="%{y}, step %{x}<br>norm %{customdata:.4g}<extra></extra>",
        hoverongaps=False,
        colorbar={
            "title": {"text": "norm", "side": "right"}, "thickness": 12, "outlinewidth": 0, "tickvals": ticks,
            "ticktext": [f"10<sup>{tick}</sup>" for tick in ticks],
        },
    )  # fmt: skip
    return figure


def nonfinite(table: Mapping[str, Any], *, across: str = "step") -> Figure:
    """Heatmap of the number of NaN and Inf elements, for parameters that had any. `across`: column on the x axis."""
    count = floats(table["nonfinite"])
    bad = set(np.asarray(table["parameter"], dtype=object)[count > 0].tolist())
    keep = np.array([name in bad for name in table["parameter"]], dtype=bool)
    rows = {name: np.asarray(column)[keep] for name, column in table.items()}
    names, steps, grid = _grid(rows, "nonfinite", across)
    figure = _map(names, steps, across)
    figure.add_heatmap(
        x=[str(step) for step in steps], y=names, z=np.where(grid > 0, np.log10(np.maximum(grid, 1)) + 0.3, np.nan),
        customdata=grid, colorscale=[[0, SEVERITY["warning"]], [1, SEVERITY["critical"]]], showscale=False, xgap=1,
        ygap=1, hoverongaps=False,
        hovertemplate="%{y}, " + across + " %{x}<br>%{customdata:,.0f} NaN or Inf<extra></extra>",
    )  # fmt: skip
    return figure


def _map(names: list[str], steps: list[int], across: str = "step") -> Figure:
    figure = new_figure(height=int(min(760, max(220, 110 + 17 * len(names)))), x=across)
    # With enough steps, use a numeric axis, which has fewer labels on a narrow screen.
    if steps and steps[-1] - steps[0] >= MIN_SPAN:
        figure.update_xaxes(type="linear", nticks=4, tickangle=0, showgrid=False)  # the names leave a phone little room
    else:
        figure.update_xaxes(type="category", nticks=min(8, max(2, len(steps))), tickangle=0, showgrid=False)
    figure.update_yaxes(
        autorange="reversed", showgrid=False, tickfont={"size": 10}, dtick=1 if len(names) <= 45 else None
    )
    return figure


def _grid(
    table: Mapping[str, Any], column: str, across: str = "step"
) -> tuple[list[str], list[int], npt.NDArray[np.float64]]:
    """Names of parameters, steps, and a matrix [parameters, steps] of the largest values; NaN where there is none."""
    parameter = [str(name) for name in table["parameter"]]
    shown = sorted(set(parameter), key=_natural)[:MAX_PARAMETERS]
    steps = sorted(set(ints(table[across]).tolist()))
    row, place = {name: i for i, name in enumerate(shown)}, {step: i for i, step in enumerate(steps)}
    grid = np.full((len(shown), len(steps)), np.nan)
    values: Floats = floats(table[column])
    for name, step, value in zip(parameter, ints(table[across]).tolist(), values.tolist(), strict=True):
        if name in row:
            cell = (row[name], place[step])
            grid[cell] = np.fmax(grid[cell], value)
    return [label(name, 44) for name in shown], steps, grid


def _natural(name: str) -> tuple[Any, ...]:
    """Sort key: embeddings come first, the output layer last, and `blocks.10` after `blocks.9`."""
    first = 0 if "emb" in name else 2 if re.search(r"head|output|final", name) else 1
    return (first, *((int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(name)))
