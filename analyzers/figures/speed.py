"""Step time and throughput over the steps.

figure = draw(columns)          # step, low, middle, high (ms), tokens_per_s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plotly.graph_objects import Figure

from analyzers.figures.drawing.band import add_band, add_line
from analyzers.figures.drawing.start_up import limit_start
from analyzers.figures.drawing.theme import SEQUENCE, new_figure
from analyzers.source import floats, ints

__all__ = ["draw"]


def draw(curve: Mapping[str, Any], *, height: int = 420) -> Figure:
    """Draw step time as its median and a band (10th to 90th percentile over the ranks), with throughput below."""
    figure = new_figure(height=height, x="step")
    step = ints(curve["step"])
    low, middle, high, rate = (floats(curve[name]) for name in ("low", "middle", "high", "tokens_per_s"))
    figure.update_layout(
        yaxis={"domain": [0.4, 1], "title": {"text": "step time (ms)"}, "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.3], "title": {"text": "tokens/s"}, "anchor": "x", "rangemode": "tozero"},
        xaxis={"anchor": "y2"},
    )
    hover = "step %{x}: %{y:,.4g}"
    add_band(figure, step, low, middle, high, name="10th to 90th percentile", median="median of the ranks", hover=hover)
    add_line(figure, step, rate, name="tokens/s", colour=SEQUENCE[2], hover=hover, yaxis="y2")
    limit_start(figure, step, [high], unit="ms")
    return figure
