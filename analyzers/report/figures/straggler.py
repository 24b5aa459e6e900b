"""How long ranks work for themselves: all of them in order, and one of them against the others over the steps.

ranking(queries.own_work(store), culprits=(3,))
beside_peers(queries.rank_against_others(store, 0, 3), rank=3, onset=60)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...source import floats, ints
from .reduce import extremes
from .theme import PHASE, SEQUENCE, SEVERITY, new_figure, tint

__all__ = ["beside_peers", "ranking"]

MAX_RANKS = 24
_PARTS = ("data", "forward", "backward", "optimizer")


def ranking(work: Mapping[str, Any], culprits: Sequence[int] = ()) -> go.Figure:
    """`work`: columns rank and the median milliseconds of each phase without waits. The slowest on top."""
    rank = ints(work["rank"])
    parts = {name: np.nan_to_num(floats(work[name])) for name in _PARTS}
    total = np.sum(list(parts.values()), axis=0) if len(rank) else np.zeros(0)
    order = np.argsort(-total, kind="stable")[:MAX_RANKS]
    figure = new_figure(
        height=int(130 + 24 * len(order)), x="own work a step, median, without waiting", barmode="stack"
    )
    names = [f"<b>rank {rank[i]}</b>" if rank[i] in culprits else f"rank {rank[i]}" for i in order]
    for name in _PARTS:
        if len(order) and parts[name][order].max() > 0:
            figure.add_bar(
                y=names, x=parts[name][order], name=name, orientation="h", width=0.7,
                marker={"color": PHASE[name], "line": {"width": 0}},
                hovertemplate="%{y}: %{x:.4g} ms " + name + "<extra></extra>",
            )  # fmt: skip
    if len(total) > 1:
        figure.add_vline(x=float(np.median(total)), line={"dash": "dot", "width": 1.5, "color": SEQUENCE[7]})
    figure.update_xaxes(ticksuffix=" ms")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def beside_peers(work: Mapping[str, Any], *, rank: int, onset: int | None = None) -> go.Figure:
    """`work`: columns step, own, low, middle, high (milliseconds): the rank, and percentiles of the others."""
    step = ints(work["step"])
    own, low, middle, high = (floats(work[name]) for name in ("own", "low", "middle", "high"))
    figure = new_figure(height=300, x="step", y="own work (ms)")
    band = extremes(high, 2_000)
    common: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip"}
    figure.add_scatter(x=step[band], y=low[band], line={"width": 0}, showlegend=False, **common)
    figure.add_scatter(
        x=step[band], y=high[band], line={"width": 0}, fill="tonexty", fillcolor=tint(SEQUENCE[0], 0.18),
        name="others, 10th to 90th percentile", **common,
    )  # fmt: skip
    for values, name, colour, width in (
        (middle, "others, median", SEQUENCE[0], 1.5),
        (own, f"rank {rank}", SEVERITY["warning"], 2.0),
    ):
        keep = extremes(values)
        figure.add_scatter(
            x=step[keep], y=values[keep], mode="lines", name=name, line={"color": colour, "width": width},
            hovertemplate="step %{x}: %{y:.4g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    if onset is not None:
        figure.add_vline(x=onset, line={"dash": "dot", "width": 1.5, "color": SEVERITY["warning"]})
    figure.update_yaxes(rangemode="tozero")
    return figure
