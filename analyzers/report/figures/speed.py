"""How long a step takes and how many tokens it trains a second, over the steps.

figure = draw(columns)          # step, low, middle, high (ms), tokens_per_s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plotly.graph_objects import Figure

from ...source import floats, ints
from .reduce import extremes
from .theme import SEQUENCE, new_figure, tint

__all__ = ["draw"]


def draw(curve: Mapping[str, Any], *, height: int = 420) -> Figure:
    """Step time as a band (10th to 90th percentile over the ranks) with its median; below it the throughput."""
    figure = new_figure(height=height, x="step")
    step = ints(curve["step"])
    low, middle, high, rate = (floats(curve[name]) for name in ("low", "middle", "high", "tokens_per_s"))
    figure.update_layout(
        yaxis={"domain": [0.4, 1], "title": {"text": "step time (ms)"}, "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.3], "title": {"text": "tokens/s"}, "anchor": "x", "rangemode": "tozero"},
        xaxis={"anchor": "y2"},
    )
    keep = extremes(high, 2_000)
    common: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "line": {"width": 0}}
    figure.add_scatter(x=step[keep], y=low[keep], showlegend=False, **common)
    figure.add_scatter(
        x=step[keep], y=high[keep], fill="tonexty", fillcolor=tint(SEQUENCE[0], 0.2), name="10th to 90th %",
        **common,
    )  # fmt: skip
    for values, name, colour, axis in (
        (middle, "median of the ranks", SEQUENCE[0], "y"),
        (rate, "tokens/s", SEQUENCE[2], "y2"),
    ):
        keep = extremes(values)
        figure.add_scatter(
            x=step[keep], y=values[keep], mode="lines", name=name, yaxis=axis, line={"color": colour, "width": 1.6},
            hovertemplate="step %{x}: %{y:,.4g}<extra>" + name + "</extra>",
        )  # fmt: skip
    return figure
