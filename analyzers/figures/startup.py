"""The start of an attempt, rank by rank: what each piece of it took.

figure = draw(start.by_rank, accused={5})          # {piece: {rank: seconds}} of `analyzers.settings.startup`
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from plotly.graph_objects import Figure

from analyzers.figures.theme import SEQUENCE, new_figure

__all__ = ["draw"]

MAX_RANKS = 32
_WORDS = {"launch": "launch", "imports": "processes and imports", "setup": "model, data, groups",
          "first_step": "first step, beyond a usual one"}  # fmt: skip


def draw(by_rank: Mapping[str, Mapping[int, float]], accused: Set[int] = frozenset()) -> Figure:
    """Seconds, stacked in the order in which they come; of many ranks those that took longest, the slowest on top."""
    total: dict[int, float] = {}
    for of in by_rank.values():
        for rank, seconds in of.items():
            total[rank] = total.get(rank, 0.0) + seconds
    ranks = sorted(total, key=lambda rank: (rank not in accused, -total[rank]))[:MAX_RANKS]
    figure = new_figure(height=int(140 + 24 * len(ranks)), x="seconds", barmode="stack")
    names = [f"<b>rank {rank}</b>" if rank in accused else f"rank {rank}" for rank in ranks]
    for number, (piece, words) in enumerate(_WORDS.items()):
        of = by_rank.get(piece, {})
        if of:
            figure.add_bar(
                y=names, x=[of.get(rank, 0.0) for rank in ranks], name=words, orientation="h", width=0.7,
                marker={"color": SEQUENCE[number], "line": {"width": 0}},
                hovertemplate="%{y}: %{x:.3g} s " + words + "<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
