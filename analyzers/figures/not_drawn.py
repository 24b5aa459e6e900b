"""A figure in place of one that could not be drawn: the rest of the page stands.

not_drawn("plug-in slow_save", "ZeroDivisionError: division by zero").title
"""

from __future__ import annotations

import html

import plotly.graph_objects as go

from analyzers.figures.titled_figure import Drawing

__all__ = ["not_drawn"]


def not_drawn(whose: str, reason: str) -> Drawing:
    """An empty figure that says why; `whose`: the analysis or the plug-in."""
    figure = go.Figure()
    figure.add_annotation(text=html.escape(reason)[:300], showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    figure.update_layout(height=120, xaxis_visible=False, yaxis_visible=False)
    return Drawing(title=f"Figure of {whose} could not be drawn", figure=figure)
