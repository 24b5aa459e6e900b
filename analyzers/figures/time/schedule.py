"""A pipeline step as it ran: forward and backward passes of each stage, numbered by microbatch.

    figure = draw(pieces)           # columns rank, stage, microbatch, kind, start_ms, end_ms
    figure = idle(by_rank, expected=0.27)
    figure = idle_by_step({1: 0.31, 2: 0.30}, expected=0.27)

Lines connect a microbatch's work on one stage with that on the next, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import PHASE, SEQUENCE, ink, new_figure
from analyzers.figures.time.flow import Stop, add_flow
from analyzers.source import floats, ints

__all__ = ["draw", "idle", "idle_by_step"]

MAX_NUMBERS = 400
_SHOWN = {"forward": "F", "loss": "", "backward": "B", "weight": "W", "send": "", "recv": ""}


def draw(pieces: Mapping[str, Any], *, flow: bool = True) -> Figure:
    """Stages from top to bottom, milliseconds from left to right."""
    stage, microbatch = ints(pieces["stage"]), ints(pieces["microbatch"])
    start, end = floats(pieces["start_ms"]), floats(pieces["end_ms"])
    kind = np.asarray(pieces["kind"], dtype=object).astype(str)
    stages = sorted(set(stage.tolist()))
    figure = new_figure(height=int(min(760, 130 + 58 * max(1, len(stages)))), x="milliseconds", barmode="overlay")
    numbers = len(kind) <= MAX_NUMBERS
    for name in _SHOWN:
        rows = np.flatnonzero(kind == name)
        if not len(rows):
            continue
        thin = name in ("send", "recv")
        figure.add_bar(
            y=stage[rows] + (0.34 if thin else 0.0), x=end[rows] - start[rows], base=start[rows], orientation="h",
            width=0.12 if thin else 0.54, name=name,
            marker={"color": PHASE[name], "line": {"width": 0.4, "color": "rgba(128,128,128,0.5)"}},
            text=[str(microbatch[i]) if _SHOWN[name] and microbatch[i] >= 0 else "" for i in rows] if numbers else None,
            textposition="inside", insidetextanchor="middle", textangle=0,
            textfont={"color": ink(PHASE[name]), "size": 11},
            constraintext="none", customdata=microbatch[rows],
            hovertemplate="stage %{y:.0f}, microbatch %{customdata}: " + name + " %{x:.3f} ms<extra></extra>",
        )  # fmt: skip
    if flow:
        stops = [
            Stop(row=stage[i], key=int(microbatch[i]), stage=int(stage[i]), kind=kind[i], start_ms=start[i],
                 end_ms=end[i])
            for i in range(len(kind))
        ]  # fmt: skip
        add_flow(figure, stops, half=0.27)
    figure.update_yaxes(
        tickmode="array", tickvals=stages, ticktext=[f"stage {number}" for number in stages], autorange="reversed",
        showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(ticksuffix=" ms", title={"text": ""})
    return figure


def idle(ranks: Mapping[str, float], *, expected: float | None = None) -> Figure:
    """Draw the idle share (0 to 1) by stage or rank, and a line at the bubble of the schedule with equal stages."""
    figure = new_figure(height=int(120 + 30 * len(ranks)), x="idle share of the pipeline's time", showlegend=False)
    names = list(ranks)
    figure.add_bar(
        y=names, x=[100 * ranks[name] for name in names], orientation="h", width=0.62,
        marker={"color": SEQUENCE[3], "line": {"width": 0}}, text=[f"{100 * ranks[name]:.1f} %" for name in names],
        textposition="outside", cliponaxis=False, hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    if expected is not None:
        figure.add_vline(x=100 * expected, line={"dash": "dot", "width": 1.5, "color": SEQUENCE[7]})
        figure.add_annotation(
            x=100 * expected, y=1, yref="paper", yanchor="bottom", showarrow=False, text="equal stages"
        )
    largest = max([*ranks.values(), expected or 0.0], default=0.0)
    figure.update_xaxes(range=[0, max(5.0, 118 * largest)], ticksuffix=" %")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def idle_by_step(shares: Mapping[int, float], *, expected: float | None = None) -> Figure:
    """Draw the pipeline's idle share (0 to 1) over the steps, and a line at the schedule's bubble with equal stages."""
    figure = new_figure(height=240, x="step", y="idle share", showlegend=False)
    figure.add_scatter(
        x=list(shares), y=[100 * share for share in shares.values()], mode="lines" if len(shares) > 2 else "markers",
        line={"color": SEQUENCE[3], "width": 1.6}, hovertemplate="step %{x}: %{y:.1f} %<extra></extra>",
    )  # fmt: skip
    if expected is not None:
        figure.add_hline(  # its text is below it, since the measured share is above
            y=100 * expected, line={"dash": "dot", "width": 1.5, "color": SEQUENCE[7]}, annotation_text="equal stages",
            annotation_position="bottom left",
        )  # fmt: skip
    figure.update_yaxes(rangemode="tozero", ticksuffix=" %")
    return figure
