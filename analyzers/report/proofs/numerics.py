"""Figures of the state that a restart loaded, and of compressed gradients."""

from __future__ import annotations

from collections.abc import Iterator

from analyzers.figures import numbers
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.source import Source, lacking

__all__ = ["compression"]

MAX_RANKS = 64


def compression(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The relative error of compressed gradients over the steps."""
    if lacking(source, steps=("compression_error",)):
        return
    table = source.query(
        "SELECT step, max(compression_error) AS error FROM steps WHERE compression_error IS NOT NULL "
        "GROUP BY attempt, step ORDER BY attempt, step"
    )
    yield Drawing(title="Error of compressed gradients", figure=numbers.compression(table))
