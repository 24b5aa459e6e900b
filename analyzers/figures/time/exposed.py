"""Communication of each step in milliseconds: exposed transfers and waits, and what is hidden behind computation.

figure = draw(step, transfer_ms, late_ms, overlapped_ms)
"""

from __future__ import annotations

from plotly.graph_objects import Figure

from analyzers.figures.drawing.start_up import limit_start
from analyzers.figures.drawing.theme import CATEGORY, SEQUENCE
from analyzers.figures.time import stacked
from analyzers.source import Floats, Ints

__all__ = ["draw"]


def draw(step: Ints, transfer_ms: Floats, late_ms: Floats, overlapped_ms: Floats) -> Figure:
    """Draw means over the ranks, stacked, with exposed transfers at the bottom; for at most about 2,000 steps."""
    parts = [
        ("exposed: transfer", transfer_ms, CATEGORY["communication"]),
        ("exposed: waiting for stragglers", late_ms, CATEGORY["straggler"]),
        ("hidden behind computation", overlapped_ms, SEQUENCE[7]),
    ]
    figure = stacked.draw(step, parts, y="ms, mean of the ranks")
    limit_start(figure, step, [transfer_ms + late_ms + overlapped_ms], unit="ms")
    return figure
