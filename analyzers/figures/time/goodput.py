"""Where the wall time went: a waterfall down to training time, a bar for each rank, and a single bar.

waterfall(diagnosis.goodput)
by_rank(diagnosis.goodput)
strip(diagnosis.goodput)
"""

from __future__ import annotations

import plotly.graph_objects as go

from analyzers.account.goodput import CATEGORIES, Account
from analyzers.figures.drawing.theme import CATEGORY, SEQUENCE, ink, new_figure

__all__ = ["by_rank", "strip", "waterfall"]

MAX_RANKS = 64
_LEAST = 0.0005
"""Share of the wall time below which a category is not drawn."""
_LABELLED = 4
"""Percentage from which a part of the strip shows its number; for a smaller part the number is in the legend."""


def waterfall(account: Account) -> go.Figure:
    """Draw bars that each begin where the one above ends. The last one is training, if it was measured."""
    wall = account.wall_s or 1.0
    lost = sorted((n for n in CATEGORIES if n != "training"), key=lambda name: -account.seconds[name])
    lost = [name for name in lost if account.seconds[name] >= _LEAST * wall]
    kept = ["training"] if account.goodput_ratio is not None else []  # no bar if not measured: a bar would mean 0
    names = ["wall time", *(account.names[name] for name in (*lost, *kept))]
    lengths = [account.wall_s, *(account.seconds[name] for name in (*lost, *kept))]
    starts, left = [0.0], account.wall_s
    for name in lost:
        left -= account.seconds[name]
        starts.append(max(0.0, left))
    starts += [0.0 for _ in kept]
    colours = [SEQUENCE[7], *(CATEGORY[name] for name in (*lost, *kept))]
    # On a narrow screen a text takes nearly half of the width. So it is drawn inside a long bar, or beside a short one.
    is_long = [length >= wall / 2 for length in lengths]
    width = 1.3 * wall
    is_left = [
        not long and start > width - start - length
        for long, start, length in zip(is_long, starts, lengths, strict=True)
    ]
    figure = new_figure(height=90 + 30 * len(names), x="seconds, mean over the ranks", showlegend=False)
    figure.add_bar(
        y=names, orientation="h", width=0.68,
        x=[-length if left else length for length, left in zip(lengths, is_left, strict=True)],
        base=[start + length if left else start for start, length, left in zip(starts, lengths, is_left, strict=True)],
        marker={"color": colours, "line": {"width": 0}}, text=[_hover(length, wall) for length in lengths],
        textposition=["inside" if long else "outside" for long in is_long], insidetextanchor="middle", textangle=0,
        insidetextfont={"color": [ink(colour) for colour in colours]}, outsidetextfont={"size": 10},
        cliponaxis=False, hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(range=[0, width], ticksuffix=" s")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _hover(seconds: float, wall: float) -> str:
    return f"{seconds:.3g} s · {100 * seconds / wall:.2g} %" if seconds < wall else f"{seconds:.3g} s"


def by_rank(account: Account) -> go.Figure:
    """Draw one stacked bar per rank. Of many ranks, only those with the least and the most training are shown."""
    ranks, x = sorted(account.by_rank), "seconds"
    if len(ranks) > MAX_RANKS:
        ordered = sorted(ranks, key=lambda rank: account.by_rank[rank]["training"])
        x = f"seconds, {MAX_RANKS} of {len(ranks):,} ranks:<br>those with the least and the most training"
        ranks = sorted(ordered[: MAX_RANKS // 2] + ordered[-MAX_RANKS // 2 :])
    figure = new_figure(height=int(150 + 22 * len(ranks)), x=x, barmode="stack")
    for name, text in account.names.items():
        values = [account.by_rank[rank][name] for rank in ranks]
        if max(values) < _LEAST * account.wall_s:
            continue
        figure.add_bar(
            y=[f"rank {rank}" for rank in ranks], x=values, name=text, orientation="h", width=0.72,
            marker={"color": CATEGORY[name], "line": {"width": 0}},
            hovertemplate="%{y}: %{x:.4g} s " + text + "<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(legend={"y": 1.0})
    return figure


def strip(account: Account) -> go.Figure:
    """Draw the wall time as one bar, with its parts in the order of `CATEGORIES` (training first)."""
    figure = new_figure(height=176, barmode="stack")
    wall = account.wall_s or 1.0
    for name, text in account.names.items():
        seconds = account.seconds[name]
        if seconds < _LEAST * wall:
            continue
        share = 100 * seconds / wall
        short = f"{share:.0f} %" if share >= 0.5 else "<1 %"  # a longer text does not fit into an entry of the legend
        figure.add_bar(
            y=[""], x=[seconds], name=text if share >= _LABELLED else f"{text} {short}",
            orientation="h", width=0.9, textangle=0,
            text=[short if share >= _LABELLED else ""], textposition="inside", insidetextanchor="middle",
            textfont={"color": ink(CATEGORY[name])}, marker={"color": CATEGORY[name], "line": {"width": 0}},
            hovertemplate=f"{text}: %{{x:.4g}} s, {share:.2g} %<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s", range=[0, wall], title={"text": ""}, side="top")  # the legend is below it
    figure.update_yaxes(visible=False)
    # The legend has two columns on a phone, because a single one would cover the bar.
    figure.update_layout(
        legend={"y": -0.1, "yanchor": "top", "traceorder": "normal", "font": {"size": 10}, "entrywidth": 130}
    )
    figure.update_layout(margin={"l": 8, "r": 8, "t": 28, "b": 76})
    return figure
