"""Path of a microbatch through a pipeline: lines from one stage to the next, forward and backward.

    add_flow(figure, [Stop(row=0, key=3, stage=0, kind="forward", start_ms=1.0, end_ms=2.0), ...], half=0.27)

The lines are drawn over the schedule of one pipeline, and over the timeline of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import SEQUENCE, tint

__all__ = ["Stop", "add_flow"]

MAX_FLOWS = 600
SKEW_MS = 1.0
"""Maximum clock difference of two hosts. A line that would go back in time by more than this is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One piece of work on a microbatch; only pieces with the same `key` are connected."""

    row: float
    key: Hashable
    stage: int
    kind: str
    start_ms: float
    end_ms: float


def add_flow(figure: Figure, stops: Sequence[Stop], *, half: float) -> None:
    """Add thin lines from the end of a piece to the start of the next. `half`: half the height of a bar, the distance
    from the middle of a row at which a line ends."""
    for number, (kind, way) in enumerate((("forward", 1), ("backward", -1))):
        xs: list[float | None] = []
        ys: list[float | None] = []
        for a, b in _pairs(stops, kind, way):
            side = half if b.row > a.row else -half
            xs += [a.end_ms, b.start_ms, None]
            ys += [a.row + side, b.row - side, None]
        if xs:
            figure.add_scatter(
                x=xs, y=ys, mode="lines", line={"width": 1, "color": tint(SEQUENCE[7], 0.55)}, hoverinfo="skip",
                name="flow", legendgroup="flow", showlegend=number == 0,
            )  # fmt: skip


def _pairs(stops: Sequence[Stop], kind: str, way: int) -> Iterator[tuple[Stop, Stop]]:
    place = {(stop.key, stop.stage): stop for stop in stops if stop.kind == kind}
    for (key, stage), stop in list(place.items())[:MAX_FLOWS]:
        following = place.get((key, stage + way))
        if following is not None and following.row != stop.row and following.start_ms >= stop.end_ms - SKEW_MS:
            yield stop, following
