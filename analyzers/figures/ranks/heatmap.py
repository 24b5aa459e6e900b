"""Heatmap of ranks over steps: the time of a phase, or any other measure of steps, as recorded.

    figure = draw(rank_step.rank_step(store, "own work"), marks=[Mark(rank=3, first_step=60, ...)])

In a large run a cell is the largest value of several ranks and steps (a median over ranks would hide the slow one). The
colour scale runs from the 2nd to the 98th percentile, or up to the largest median of a row if that is higher. So a
single garbage collection does not make the rest uniform, and one slow rank among thousands is still within the scale.
`excess_map` shows which ranks are slower than their peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analyzers.figures.drawing.theme import HEAT, heat_range, label, new_figure
from analyzers.figures.ranks.rank_step import Matrix
from analyzers.finding import Finding
from analyzers.kinds import title_of

__all__ = ["Mark", "draw", "marks_of"]

MAX_MARKS = 12
MAX_MARKED_RANKS = 4
"""A finding with more ranks than this is not marked."""
MARK = "#e8590c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Steps of a rank that a finding is about."""

    rank: int
    first_step: int
    last_step: int
    text: str


def marks_of(fired: Sequence[Finding]) -> tuple[Mark, ...]:
    """Marks of findings that name a few ranks and a step."""
    return tuple(
        Mark(
            rank=rank, first_step=found.first_step,
            last_step=found.first_step if found.last_step is None else found.last_step,
            text=title_of(found.kind).lower(),
        )
        for found in fired
        if found.first_step is not None and len(found.ranks) <= MAX_MARKED_RANKS
        for rank in found.ranks
    )  # fmt: skip


def draw(matrix: Matrix, *, marks: Sequence[Mark] = ()) -> go.Figure:
    """Ranks from top to bottom, steps from left to right."""
    rows = len(matrix.ranks)
    figure = new_figure(height=int(min(560, max(190, 110 + 26 * rows))), x="step", y="rank")
    finite = matrix.values[np.isfinite(matrix.values)]
    low, high = np.percentile(finite, (2, 98)) if len(finite) else (0.0, 1.0)
    for row in matrix.values:
        known = row[np.isfinite(row)]
        high = max(high, float(np.median(known))) if len(known) else high
    low, high = heat_range(float(low), float(high))
    unit = matrix.unit
    of_cell = (
        f"largest of {matrix.ranks_per_cell} x {matrix.steps_per_cell} ranks and steps: " if matrix.is_reduced else ""
    )
    figure.add_heatmap(
        x=matrix.steps, y=matrix.ranks, z=np.round(matrix.values, 3).astype(np.float32), colorscale=HEAT,
        zmin=low, zmax=high,
        colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="rank %{y}, step %{x}<br>" + of_cell + "%{z:.4g} " + label(unit) + "<extra></extra>",
        hoverongaps=False,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    if rows <= 32:
        figure.update_yaxes(tickmode="array", tickvals=[int(rank) for rank in matrix.ranks])
    figure.update_xaxes(showgrid=False)
    half = matrix.ranks_per_cell / 2
    for mark in marks[:MAX_MARKS]:
        figure.add_shape(
            type="rect", x0=mark.first_step - 0.5, x1=mark.last_step + 0.5, y0=mark.rank - half, y1=mark.rank + half,
            line={"color": MARK, "width": 2},
        )  # fmt: skip
        figure.add_annotation(
            x=mark.first_step - 0.5, y=mark.rank - half, text=label(mark.text, 24), showarrow=False, xanchor="left",
            yanchor="middle", font={"size": 11, "color": "#ffffff"}, bgcolor=MARK, borderpad=1,
        )  # fmt: skip
    return figure
