"""A figure with its title: what `evidence` and the `proofs` give to a page."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure with a title and one sentence for those who cannot see it."""

    title: str
    figure: go.Figure
