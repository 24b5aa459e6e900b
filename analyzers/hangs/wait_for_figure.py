"""Wait-for graph of a hang: ranks on a circle, with an arrow to each awaited rank.

figure = draw(view, blame)

Culprits are red, waiting ranks blue, and the arrows of a cycle bold. With many ranks, only the culprits and some
waiting ranks are shown, and the rest are counted.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go

from analyzers.figures.drawing.theme import SEQUENCE, SEVERITY, ink, label, new_figure
from analyzers.hangs.culprits import HangCause
from analyzers.hangs.wait_graph import Wait, waits_of
from analyzers.run.calls.snapshot import AttemptView

__all__ = ["draw"]

MAX_RANKS = 24
MAX_ARROWS = 80


def draw(view: AttemptView, blame: HangCause) -> go.Figure:
    """The wait-for graph at the end of an attempt."""
    waits = waits_of(view)
    shown = _shown(view, blame, waits)
    place = _places(shown, blame)
    figure = new_figure(height=380, showlegend=True)
    arrows = [wait for wait in waits if wait.rank in place and wait.awaited in place]
    in_cycle = set(zip(blame.cycle, (*blame.cycle[1:], *blame.cycle[:1]), strict=True)) if blame.cycle else set()
    arrows.sort(key=lambda wait: (wait.rank, wait.awaited) not in in_cycle)
    for wait in arrows[:MAX_ARROWS]:
        _arrow(figure, place[wait.rank], place[wait.awaited], bold=(wait.rank, wait.awaited) in in_cycle)
    _nodes(figure, view, waits, place, blame)
    hidden = len(view.ranks) - len(shown)
    if hidden > 0:
        figure.add_annotation(x=0, y=-1.42, showarrow=False, text=f"and {hidden:,} more ranks, most of which wait too")
    call = blame.call
    if call is not None:
        figure.add_annotation(x=0, y=1.42, showarrow=False, text=label(f"the others wait in {call.text}", 120))
    figure.update_xaxes(visible=False, range=[-2.4, 2.4])
    figure.update_yaxes(visible=False, range=[-1.55, 1.55], scaleanchor="x", scaleratio=1)
    figure.update_layout(margin={"l": 8, "r": 8, "t": 36, "b": 8})
    return figure


def _shown(view: AttemptView, blame: HangCause, waits: list[Wait]) -> list[int]:
    first = list(dict.fromkeys([*blame.cycle, *blame.culprits]))[: MAX_RANKS // 2]
    waiting = [wait.rank for wait in waits if wait.awaited in first]
    return list(dict.fromkeys([*first, *waiting, *sorted(view.ranks)]))[:MAX_RANKS]


def _places(ranks: list[int], blame: HangCause) -> dict[int, tuple[float, float]]:
    """Positions of the ranks. A single culprit is in the middle, and all other ranks are on the circle."""
    middle = ranks[0] if len(blame.culprits) == 1 and len(ranks) > 2 and not blame.cycle else None
    around = sorted(rank for rank in ranks if rank != middle)
    place = {
        rank: (1.15 * math.sin(2 * math.pi * i / len(around)), 1.15 * math.cos(2 * math.pi * i / len(around)))
        for i, rank in enumerate(around)
    }
    if middle is not None:
        place[middle] = (0.0, 0.0)
    return place


def _arrow(figure: go.Figure, begin: tuple[float, float], end: tuple[float, float], *, bold: bool) -> None:
    colour = SEVERITY["critical"] if bold else SEQUENCE[7]
    length = math.dist(begin, end) or 1.0
    ux, uy = (end[0] - begin[0]) / length, (end[1] - begin[1]) / length
    # From the rim of one circle to the rim of the other, slightly offset so that two arrows between the same ranks do
    # not overlap.
    side = 0.05
    figure.add_annotation(
        x=end[0] - 0.17 * ux - side * uy, y=end[1] - 0.17 * uy + side * ux, ax=begin[0] + 0.17 * ux - side * uy,
        ay=begin[1] + 0.17 * uy + side * ux, xref="x", yref="y", axref="x", ayref="y", showarrow=True, text="",
        arrowhead=2, arrowsize=1.1, arrowwidth=2.4 if bold else 1.2, arrowcolor=colour, opacity=1.0 if bold else 0.75,
    )  # fmt: skip


def _nodes(
    figure: go.Figure, view: AttemptView, waits: list[Wait], place: dict[int, tuple[float, float]], blame: HangCause
) -> None:
    hover_of: dict[int, str] = {}
    for wait in waits:
        hover_of.setdefault(wait.rank, f"waits for rank {wait.awaited}<br>in {label(wait.call.text, 90)}")
    kinds = [
        ("waited for", SEVERITY["critical"], [rank for rank in place if rank in blame.culprits]),
        ("waits", SEQUENCE[0], [rank for rank in place if rank in hover_of and rank not in blame.culprits]),
        ("neither", SEQUENCE[7], [rank for rank in place if rank not in hover_of and rank not in blame.culprits]),
    ]
    for name, colour, ranks in kinds:
        if ranks:
            doing = [view.ranks[rank].doing if rank in view.ranks else "no record" for rank in ranks]
            figure.add_scatter(
                x=[place[rank][0] for rank in ranks], y=[place[rank][1] for rank in ranks], mode="markers+text",
                name=name, text=[str(rank) for rank in ranks], textfont={"color": ink(colour), "size": 12},
                marker={"size": 32, "color": colour, "line": {"width": 0}},
                hovertext=[f"rank {r}: {hover_of.get(r, label(d, 60))}" for r, d in zip(ranks, doing, strict=True)],
                hovertemplate="%{hovertext}<extra></extra>",
            )  # fmt: skip
