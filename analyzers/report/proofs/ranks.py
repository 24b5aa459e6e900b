"""Proofs about ranks: one rank's work, memory or gradient beside that of the others over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analyzers.figures import startup as startup_figure
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.settings.startup import measure
from analyzers.source import Source, lacking

__all__ = ["startup"]


def startup(source: Source, finding: Finding) -> Iterator[Drawing]:
    """What each piece of the start took, rank by rank."""
    if lacking(source, steps=("start_ns",), ranks=("wall_ns",), events=("wall_ns",)):
        return
    start: Any = next((one for one in measure(source) if one.attempt == (finding.attempt or 0)), None)
    if start is not None and start.by_rank:
        figure = startup_figure.draw(start.by_rank, set(finding.ranks))
        yield Drawing(title="The start, piece by piece", figure=figure)
