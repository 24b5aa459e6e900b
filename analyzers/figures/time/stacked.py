"""Parts of the step time, stacked over the steps: the figure shows which part grew, and since when.

figure = draw(steps, [("data", data_ms, PHASE["data"]), ("compute", compute_ms, PHASE["forward"])], y="ms per step")

Steps without data are a gap, because a line through them would show values that were not recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from plotly.graph_objects import Figure

from analyzers.figures.drawing.focus import mark_onset
from analyzers.figures.drawing.theme import new_figure, tint
from analyzers.source import Floats, Ints

__all__ = ["draw", "stretches"]

MAX_STRETCHES = 40
GAP = 2
"""Two neighbouring steps are separated by a gap if they are more than this many times the usual distance apart."""


def draw(
    step: Ints, parts: Sequence[tuple[str, Floats, str]], *, y: str, onset: float | None = None, height: int = 280
) -> Figure:
    """Draw `parts` (name, milliseconds, colour) from the bottom up. Give it at most about 2,000 steps: it does not
    downsample.
    """
    figure = new_figure(height=height, x="step", y=y)
    for number, (begin, end) in enumerate(stretches(step)):
        for name, values, colour in parts:
            figure.add_scatter(
                x=step[begin:end], y=values[begin:end], mode="lines" if end - begin > 1 else "markers",
                stackgroup=f"stretch-{number}", name=name, legendgroup=name, showlegend=number == 0,
                line={"width": 0.8, "color": colour}, marker={"size": 4, "color": colour},
                fillcolor=tint(colour, 0.55), hovertemplate="step %{x}: %{y:.4g} ms<extra>" + name + "</extra>",
            )  # fmt: skip
    mark_onset(figure, onset)
    figure.update_yaxes(rangemode="tozero")
    return figure


def stretches(step: Ints) -> list[tuple[int, int]]:
    """Half-open index ranges of the steps between gaps. If there are many gaps, only the largest ones count."""
    if not len(step):
        return []
    distances = np.diff(step)
    gaps = np.flatnonzero(distances > GAP * np.median(distances)) if len(distances) else np.zeros(0, dtype=np.int64)
    gaps = np.sort(gaps[np.argsort(-distances[gaps], kind="stable")][: MAX_STRETCHES - 1]) + 1
    borders = [0, *gaps.tolist(), len(step)]
    return list(itertools.pairwise(borders))
