"""Figures of settings that cost time, and of a slow start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.checkpoints import figures as checkpoints
from analyzers.communication import figures as communication
from analyzers.data import figures as data
from analyzers.figures import numbers
from analyzers.figures.drawing.theme import SEQUENCE, new_figure
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.pipeline import figures as pipeline
from analyzers.settings.startup import measure
from analyzers.source import Source, lacking

__all__ = ["FIGURES", "compression_error"]

Figures = Sequence[Callable[[Source, Finding], Iterator[Drawing]]]


MAX_RANKS = 32
_WORDS = {"launch": "launch", "imports": "processes and imports", "setup": "model, data, groups",
          "first_step": "first step minus a usual step"}  # fmt: skip


def startup(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The parts of a start-up, by rank."""
    if lacking(source, steps=("start_ns",), ranks=("wall_ns",), events=("wall_ns",)):
        return
    start = next((one for one in measure(source) if one.attempt == (finding.attempt or 0)), None)
    if start is not None and start.by_rank:
        figure = _pieces(start.by_rank, set(finding.ranks))
        yield Drawing(title="Parts of the start-up", figure=figure)


def compression_error(source: Source) -> dict[str, npt.NDArray[Any]]:
    """Columns step, error: relative error of the reduced gradient, for steps in which compression was measured."""
    if lacking(source, steps=("compression_error",)):
        return {"step": np.zeros(0), "error": np.zeros(0)}
    return source.query(
        "SELECT step, max(compression_error) AS error FROM steps WHERE compression_error IS NOT NULL "
        "GROUP BY attempt, step ORDER BY attempt, step"
    )


def compression(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The relative error of compressed gradients over the steps."""
    table = compression_error(source)
    if len(table["step"]):
        yield Drawing(title="Error of compressed gradients", figure=numbers.compression(table))


def configuration(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures of what a setting affects."""
    for draw in _OF_SETTING.get(finding.cause, ()):
        yield from draw(source, finding)


def _pieces(by_rank: Mapping[str, Mapping[int, float]], accused: Set[int] = frozenset()) -> Figure:
    """Stacked bars of seconds, with the parts in their order. The ranks that the finding names are on top, then the
    ranks that took longest. If there are many ranks, the others are left out.
    """
    total: dict[int, float] = {}
    for seconds_by_rank in by_rank.values():
        for rank, seconds in seconds_by_rank.items():
            total[rank] = total.get(rank, 0.0) + seconds
    ranks = sorted(total, key=lambda rank: (rank not in accused, -total[rank]))[:MAX_RANKS]
    figure = new_figure(height=int(140 + 24 * len(ranks)), x="seconds", barmode="stack")
    names = [f"<b>rank {rank}</b>" if rank in accused else f"rank {rank}" for rank in ranks]
    for number, (piece, words) in enumerate(_WORDS.items()):
        if seconds_by_rank := by_rank.get(piece, {}):
            figure.add_bar(
                y=names, x=[seconds_by_rank.get(rank, 0.0) for rank in ranks], name=words, orientation="h", width=0.7,
                marker={"color": SEQUENCE[number], "line": {"width": 0}},
                hovertemplate="%{y}: %{x:.3g} s " + words + "<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


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
