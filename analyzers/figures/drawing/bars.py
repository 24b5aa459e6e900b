"""Bar chart with the suspects of a finding highlighted, and a line at the value they were compared with.

figure = draw({"stage 0": 12.1, "stage 1": 19.8}, accused={"stage 1"}, x="own work (ms)", unit="ms", usual=12.4)
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import ACCUSED, SEQUENCE, label, new_figure

__all__ = ["draw"]

MAX_BARS = 24


def draw(
    values: Mapping[str, float],
    *,
    accused: Set[str],
    x: str,
    unit: str,
    usual: float | None = None,
    usual_name: str = "the others",
    log: bool = False,
) -> Figure:
    """Draw `values` in the given order. Of more than `MAX_BARS`, only the first ones and all accused ones are drawn."""
    names = list(values)
    if len(names) > MAX_BARS:
        kept = set(names[:MAX_BARS]) | set(accused)
        names = [name for name in names if name in kept]
    figure = new_figure(height=int(120 + 28 * len(names)), x=x, showlegend=False)
    figure.add_bar(
        y=[f"<b>{label(name, 60)}</b>" if name in accused else label(name, 60) for name in names],
        x=[values[name] for name in names], orientation="h", width=0.64,
        marker={
            "color": [ACCUSED[0] if name in accused else SEQUENCE[0] for name in names], "line": {"width": 0},
            "pattern": {"shape": ["/" if name in accused else "" for name in names], "fgopacity": 0.5},
        },
        text=[f"{values[name]:.4g} {label(unit)}" for name in names], textposition="outside", cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    if usual is not None:
        figure.add_vline(x=usual, line={"dash": "dot", "width": 1.5, "color": SEQUENCE[7]})
        figure.add_annotation(x=usual, y=1, yref="paper", yanchor="bottom", showarrow=False, text=label(usual_name))
    largest = max([*(values[name] for name in names), usual or 0.0], default=0.0)
    if log:
        figure.update_xaxes(type="log", exponentformat="power")
    else:
        figure.update_xaxes(range=[0, 1.25 * largest or 1.0])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
