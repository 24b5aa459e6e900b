"""Timeline of phases and collectives of the ranks in a few steps.

figure = draw(activity.timeline(store, attempt=0, first_step=38, last_step=41, ranks=[0, 1, 2, 3]))

Each rank has two lanes: its spans above, its collectives below, striped, for there are more kinds than colours that all
can tell apart. What had not ended when the records end is drawn to the right edge, hatched. In a pipeline thin lines
follow each microbatch from stage to stage.
"""

from __future__ import annotations

import plotly.graph_objects as go

from analyzers.figures.activity import MAX_PIECES, Piece
from analyzers.figures.flow import Stop, add_flow
from analyzers.figures.theme import CALL, PHASE, SEQUENCE, label, new_figure

__all__ = ["draw"]


def draw(pieces: list[Piece], *, ranks: list[int] | None = None) -> go.Figure:
    """Milliseconds since the first piece of each host."""
    pieces = pieces[:MAX_PIECES]
    ranks = sorted({piece.rank for piece in pieces}) if ranks is None else ranks
    lane = {rank: i for i, rank in enumerate(ranks)}
    right = max((piece.end_ms if piece.end_ms is not None else piece.start_ms for piece in pieces), default=1.0)
    right += 0.04 * right
    figure = new_figure(height=int(min(900, 120 + 46 * max(1, len(ranks)))), x="milliseconds", barmode="overlay")
    kinds: dict[tuple[str, bool, bool], list[Piece]] = {}
    for piece in sorted(pieces, key=lambda p: p.start_ms):
        kinds.setdefault((piece.kind, piece.is_call, piece.end_ms is None), []).append(piece)
    named: set[str] = set()
    for (kind, is_call, is_open), of_kind in kinds.items():
        name = label(kind, 30)
        colour = (CALL if is_call else PHASE).get(kind, SEQUENCE[7])
        hatched = {
            "shape": "/" if is_open else "-" if is_call else "",
            "size": 6,
            "fgcolor": "#ffffff",
            "fgopacity": 0.7 if is_open else 0.35,
            "fillmode": "overlay",
        }
        figure.add_bar(
            y=[lane[piece.rank] + (0.24 if is_call else -0.16) for piece in of_kind],
            x=[(right if piece.end_ms is None else piece.end_ms) - piece.start_ms for piece in of_kind],
            base=[piece.start_ms for piece in of_kind], orientation="h", width=0.26 if is_call else 0.46,
            name=name + (" (in flight)" if is_open else ""), legendgroup=name,
            showlegend=(is_open or name not in named) and not (is_call and not is_open and len(kinds) > 24),
            marker={"color": colour, "pattern": hatched, "line": {"width": 0.3, "color": "rgba(128,128,128,0.6)"}},
            hovertext=[_hover(piece) for piece in of_kind], hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
        named.add(name)
    stops = [
        Stop(row=lane[p.rank] - 0.16, key=(p.pipeline, p.step, p.microbatch), stage=p.stage, kind=p.kind,
             start_ms=p.start_ms, end_ms=p.end_ms)
        for p in pieces
        if p.stage is not None and p.microbatch is not None and p.end_ms is not None
    ]  # fmt: skip
    add_flow(figure, stops, half=0.23)
    figure.update_yaxes(
        tickmode="array", tickvals=list(lane.values()), ticktext=[f"rank {rank}" for rank in lane],
        range=[len(lane) - 0.4, -0.6], showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(range=[0, right], ticksuffix=" ms", title={"text": ""})
    return figure


def _hover(piece: Piece) -> str:
    took = "in flight at the end" if piece.end_ms is None else f"{piece.end_ms - piece.start_ms:.3f} ms"
    waited = f", waited {piece.wait_ms:.3f} ms" if piece.wait_ms else ""
    where = f"<br>{label(piece.detail, 100)}" if piece.detail else ""
    return f"rank {piece.rank}, step {piece.step}<br>{label(piece.kind, 40)}: {took}{waited}{where}"
