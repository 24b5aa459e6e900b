"""Figures of settings that cost time, and of a slow start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.checkpoints import figures as checkpoints
from analyzers.communication import figures as communication
from analyzers.data import figures as data
from analyzers.figures import numbers
from analyzers.figures import startup as startup_figure
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.pipeline import figures as pipeline
from analyzers.settings.startup import measure
from analyzers.source import Source, lacking

__all__ = ["FIGURES"]

Figures = Sequence[Callable[[Source, Finding], Iterator[Drawing]]]


def startup(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The parts of a start, rank by rank."""
    if lacking(source, steps=("start_ns",), ranks=("wall_ns",), events=("wall_ns",)):
        return
    start = next((one for one in measure(source) if one.attempt == (finding.attempt or 0)), None)
    if start is not None and start.by_rank:
        figure = startup_figure.draw(start.by_rank, set(finding.ranks))
        yield Drawing(title="The start, piece by piece", figure=figure)


def compression(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The relative error of compressed gradients over the steps."""
    if lacking(source, steps=("compression_error",)):
        return
    table = source.query(
        "SELECT step, max(compression_error) AS error FROM steps WHERE compression_error IS NOT NULL "
        "GROUP BY attempt, step ORDER BY attempt, step"
    )
    yield Drawing(title="Error of compressed gradients", figure=numbers.compression(table))


def configuration(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures of what a setting affects."""
    for draw in _OF_SETTING.get(finding.cause, ()):
        yield from draw(source, finding)


_OF_SETTING: Mapping[str, Figures] = {
    "buckets": (communication.buckets,),
    "microbatches": (pipeline.stages,),
    "tensor_parallel": (communication.exposure,),
    "compression": (compression,),
    "checkpoint_interval": (checkpoints.saved, checkpoints.waterfall),
    "workers": (data.waits,),
    "evaluation": (checkpoints.waterfall,),
}
FIGURES: Mapping[str, Figures] = {"slow_startup": (startup,), "configuration": (configuration,)}
