"""Limit an axis so that slow first steps do not flatten the later ones: start-up takes many times as long as a step.

limit_start(figure, steps, [duration_ms], unit="ms")      # the axis ends above the later steps, with a note
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly.graph_objects import Figure

from analyzers.policy import SHARED
from analyzers.source import Floats, Ints

__all__ = ["limit_start"]

_FLATTENS = 3.0
"""If the first steps' maximum exceeds the later steps' maximum by this factor, the later steps look flat."""
_ROOM = 1.1


def limit_start(figure: Figure, step: Ints, lines: Sequence[Floats], *, unit: str) -> None:
    """If values in the warm-up far exceed the later ones, end the y axis slightly above the largest later value.

    `lines`: values of each line, in the order of `step`. A note in the figure has the maximum of the first steps.
    """
    num = SHARED.warm_up_steps
    if len(step) < num + SHARED.min_steps or not lines:
        return
    first = np.concatenate([values[:num] for values in lines])
    later = np.concatenate([values[num:] for values in lines])
    if not (np.isfinite(first).any() and np.isfinite(later).any()):
        return
    highest, top = float(np.nanmax(first)), float(np.nanmax(later))
    if top <= 0 or highest < _FLATTENS * top:
        return
    figure.update_layout(yaxis={"range": [0, _ROOM * top]})
    figure.add_annotation(
        x=0, xref="paper", y=1, yref="y domain", xanchor="left", yanchor="top", showarrow=False,
        text=f"↑ first steps up to {highest:,.0f} {unit}", font={"size": 10},
    )  # fmt: skip
