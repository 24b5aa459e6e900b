"""Suspect ranks or devices over steps or seconds: one line for each suspect, and a band for the others.

    shown = RankComparison(x=steps, own={"rank 3": ms}, low=low, middle=middle, high=high)
    figure = draw(shown, y="own work (ms)", onset=60)

`onset` is the step at which the finding began, `limit` the value it was compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.figures.drawing.band import add_band, add_line
from analyzers.figures.drawing.theme import ACCUSED, DASHES, SEQUENCE, SEVERITY, label, new_figure
from analyzers.source import Floats

__all__ = ["RankComparison", "draw", "mark_limit", "mark_onset"]

MAX_OWN = 8
"""Maximum number of separate lines; further ones are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """`own`: values of each suspect over `x`. `low`, `middle`, `high`: of all others; NaN where there are none."""

    x: npt.NDArray[Any]
    own: Mapping[str, Floats]
    low: Floats
    middle: Floats
    high: Floats

    @classmethod
    def of_lines(cls, x: npt.NDArray[Any], lines: Mapping[str, Floats], suspects: set[str]) -> RankComparison:
        """Split `lines` (one per rank) into the suspects' lines, and the minimum, median and maximum of the others."""
        own = {name: values for name, values in lines.items() if name in suspects}
        others = np.array([values for name, values in lines.items() if name not in suspects])
        nothing = np.full(len(x), np.nan)
        low, middle, high = nothing.copy(), nothing.copy(), nothing.copy()
        if len(others):
            known = np.isfinite(others).any(axis=0)
            for values, reduce in ((low, np.nanmin), (middle, np.nanmedian), (high, np.nanmax)):
                values[known] = reduce(others[:, known], axis=0)
        return cls(x=x, own=own, low=low, middle=middle, high=high)


def draw(
    comparison: RankComparison,
    *,
    y: str,
    x: str = "step",
    onset: float | None = None,
    limit: tuple[float, str] | None = None,
    others: str = "others, 10th to 90th percentile",
    from_zero: bool = True,
    log: bool = False,
    height: int = 300,
) -> Figure:
    """Draw the band of the others, and the suspects on top of it."""
    figure = new_figure(height=height, x=x, y=y)
    if np.isfinite(comparison.middle).any():
        add_band(
            figure,
            comparison.x,
            comparison.low,
            comparison.middle,
            comparison.high,
            name=others,
            median="others, median",
        )
    for number, (name, values) in enumerate(list(comparison.own.items())[:MAX_OWN]):
        add_line(
            figure, comparison.x, values, name=label(name, 40), colour=ACCUSED[number % len(ACCUSED)], width=2.0,
            dash=DASHES[number // len(ACCUSED) % len(DASHES)], hover=f"{x} %{{x}}: %{{y:,.5g}}",
        )  # fmt: skip
    mark_limit(figure, limit)
    mark_onset(figure, onset)
    figure.update_yaxes(rangemode="tozero" if from_zero and not log else "normal", type="log" if log else "linear")
    return figure


def mark_onset(figure: Figure, onset: float | None) -> None:
    """Add a dotted vertical line at the onset."""
    if onset is not None:
        figure.add_vline(x=onset, line={"dash": "dot", "width": 1.5, "color": SEVERITY["warning"]})


def mark_limit(figure: Figure, limit: tuple[float, str] | None) -> None:
    """Add a dashed horizontal line at the value that the finding compares with, labelled with its name."""
    if limit is not None:
        figure.add_hline(y=limit[0], line={"dash": "dash", "width": 1.2, "color": SEQUENCE[7]})
        figure.add_annotation(
            x=1, xref="paper", y=limit[0], xanchor="right", yanchor="bottom", showarrow=False, text=label(limit[1], 60)
        )
