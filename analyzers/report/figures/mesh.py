"""Ranks at their places in the mesh, coloured by a number each: a slow node, stage or tensor group stands out as one.

    figure = draw(places, values, rows="dp_shard", columns="tp", unit="ms")

`places`: columns rank and one a dimension. Each cell is a rank, or the largest of the ranks that share the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from ...source import Floats, ints
from .theme import HEAT, label, new_figure

__all__ = ["DIMENSIONS", "draw"]

DIMENSIONS = {
    "pp": "pipeline", "dp_replicate": "replica", "dp_shard": "shard", "cp": "context", "tp": "tensor", "ep": "expert",
    "node_rank": "node", "local_rank": "local rank",
}  # fmt: skip
"""Columns of table `ranks` that say where a rank is, and what people call them."""
MAX_CELLS_WITH_TEXT = 256


def draw(places: Mapping[str, Any], values: Floats, *, rows: str, columns: str, unit: str) -> Figure:
    """Rows from top to bottom, columns from left to right."""
    of_row, of_column, rank = (ints(places[name], missing=0) for name in (rows, columns, "rank"))
    up, across = np.unique(of_row), np.unique(of_column)
    grid = np.full((len(up), len(across)), np.nan)
    names = np.full(grid.shape, "", dtype=object)
    order = np.argsort(np.nan_to_num(values, nan=-1.0), kind="stable")  # the largest is written last
    for i in order:
        place = (int(np.searchsorted(up, of_row[i])), int(np.searchsorted(across, of_column[i])))
        grid[place] = values[i]
        names[place] = f"{names[place]}, {rank[i]}" if names[place] and len(names[place]) < 12 else f"{rank[i]}"
    figure = new_figure(
        height=int(min(620, max(200, 120 + 34 * len(up)))), x=DIMENSIONS.get(columns, columns),
        y=DIMENSIONS.get(rows, rows),
    )  # fmt: skip
    figure.add_heatmap(
        x=[str(value) for value in across], y=[str(value) for value in up], z=grid, colorscale=HEAT,
        text=names if grid.size <= MAX_CELLS_WITH_TEXT else None,
        texttemplate="%{text}" if grid.size <= MAX_CELLS_WITH_TEXT else None, xgap=2, ygap=2,
        customdata=names, hovertemplate="rank %{customdata}<br>%{z:.4g} " + label(unit) + "<extra></extra>",
        colorbar={"title": {"text": label(unit), "side": "right"}, "thickness": 12, "outlinewidth": 0},
    )  # fmt: skip
    figure.update_xaxes(showgrid=False, type="category")
    figure.update_yaxes(showgrid=False, type="category", autorange="reversed")
    return figure
