"""Heatmap of agreement between replicas: ranks x checks, or ranks x parts of the state.

figure = draw(["rank 0", "rank 1"], ["10", "20", "30"], states, x="step of the check")

`states[i, j]`: 0 as the others, 1 different, 2 changed between two optimizer steps, NaN not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import SEQUENCE, SEVERITY, label, new_figure
from analyzers.source import Floats

__all__ = ["AGREES", "CHANGED", "DIFFERS", "WORDS", "draw"]

AGREES, DIFFERS, CHANGED = 0, 1, 2
WORDS = {AGREES: "as the others", DIFFERS: "differs", CHANGED: "changed between two optimizer steps"}
_COLOURS = {AGREES: SEQUENCE[7], DIFFERS: SEVERITY["warning"], CHANGED: SEVERITY["critical"]}
_SIGNS = {AGREES: "", DIFFERS: "≠", CHANGED: "!"}
"""Text of a cell, so that the figure can be read without its colours."""
MAX_SIGNS = 2_000


def draw(
    rows: Sequence[str],
    columns: Sequence[str],
    states: Floats,
    *,
    x: str,
    words: Mapping[int, str] = WORDS,
    legend: Sequence[str] = ("agrees", "differs", "changed"),
) -> Figure:
    """Rows from top to bottom, columns from left to right; `words` name the states."""
    figure = new_figure(height=int(min(620, 130 + 24 * len(rows))), x=x)
    texts = [[words.get(int(state), "") if state == state else "not checked" for state in row] for row in states]
    signs = [[_SIGNS.get(int(state), "") if state == state else "" for state in row] for row in states]
    num = len(legend)
    # Discrete colour scale: one colour per state, without blending.
    scale = [[(code + edge) / num, _COLOURS[code]] for code in range(num) for edge in (0, 1)]
    figure.add_heatmap(
        x=[label(column, 60) for column in columns], y=[label(row, 48) for row in rows], z=states, zmin=-0.5,
        zmax=num - 0.5, colorscale=scale, xgap=1, ygap=1, customdata=texts,
        text=signs if states.size <= MAX_SIGNS else None, texttemplate="%{text}" if states.size <= MAX_SIGNS else None,
        hovertemplate="%{y}, %{x}: %{customdata}<extra></extra>", hoverongaps=False,
        colorbar={"tickvals": list(range(num)), "ticktext": list(legend), "thickness": 12,
                  "outlinewidth": 0},
    )  # fmt: skip
    figure.update_xaxes(type="category", nticks=20, showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure
