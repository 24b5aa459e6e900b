"""Rank x step: a phase's time, or any other measure of steps, as colours.

figure = draw(rank_step.rank_step(store, "own work"))

One value a cell; of a big run a cell is the largest value of several ranks and steps (the median over ranks would hide
the slow one). The colours span the 2nd to the 98th percentile: one garbage collection must not make the rest uniform.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from analyzers.figures.rank_step import Matrix
from analyzers.figures.theme import HEAT, label, new_figure

__all__ = ["draw"]


def draw(matrix: Matrix) -> go.Figure:
    """Ranks from top to bottom, steps from left to right."""
    rows = len(matrix.ranks)
    figure = new_figure(height=int(min(560, max(190, 110 + 26 * rows))), x="step", y="rank")
    finite = matrix.values[np.isfinite(matrix.values)]
    low, high = np.percentile(finite, (2, 98)) if len(finite) else (0.0, 1.0)
    of_cell = (
        f"largest of {matrix.ranks_per_cell} x {matrix.steps_per_cell} ranks and steps: " if matrix.is_reduced else ""
    )
    figure.add_heatmap(
        x=matrix.steps, y=matrix.ranks, z=np.round(matrix.values, 3).astype(np.float32), colorscale=HEAT,
        zmin=float(low), zmax=float(max(high, low + 1e-6)),
        colorbar={"title": {"text": matrix.unit, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="rank %{y}, step %{x}<br>" + of_cell + "%{z:.4g} " + label(matrix.unit) + "<extra></extra>",
        hoverongaps=False,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    if rows <= 32:
        figure.update_yaxes(tickmode="array", tickvals=[int(rank) for rank in matrix.ranks])
    figure.update_xaxes(showgrid=False)
    return figure
