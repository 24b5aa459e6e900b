"""A figure with its title, as a page shows it.

Drawing(title="Loading of rank 3", figure=plotly.graph_objects.Figure(...))
"""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A Plotly figure and the title above it."""

    title: str
    figure: go.Figure
