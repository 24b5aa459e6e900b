"""Own work of the ranks: a ranking of all, and one rank against the others over the steps.

ranking(rank_step.own_work(store), culprits=(3,))
against_peers(rank_step.rank_against_others(store, 0, 3), rank=3, onset=60)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analyzers.account.time_classes import OWN_PHASES
from analyzers.figures.drawing.focus import RankComparison, draw
from analyzers.figures.drawing.theme import PHASE, SEQUENCE, new_figure
from analyzers.source import floats, ints

__all__ = ["against_peers", "ranking"]

MAX_RANKS = 24
_PARTS = {phase: phase for phase in OWN_PHASES} | {"gaps": "between phases"}


def ranking(work: Mapping[str, Any], culprits: Sequence[int] = ()) -> go.Figure:
    """Draw the slowest ranks, the slowest on top. `work`: columns of `rank_step.own_work`."""
    rank = ints(work["rank"])
    parts = {name: np.nan_to_num(floats(work[name])) for name in _PARTS}
    total = np.sum(list(parts.values()), axis=0) if len(rank) else np.zeros(0)
    order = np.argsort(-total, kind="stable")[:MAX_RANKS]
    x = "phases of a step, medians without waiting"
    if len(order) < len(total):
        x += f"<br>the {len(order)} slowest of {len(total):,} ranks"  # on a second line: a phone cuts off a longer one
    figure = new_figure(height=int(130 + 24 * len(order)), x=x, barmode="stack")
    names = [f"<b>rank {rank[i]}</b>" if rank[i] in culprits else f"rank {rank[i]}" for i in order]
    for name, words in _PARTS.items():
        if len(order) and parts[name][order].max() > 0:
            figure.add_bar(
                y=names, x=parts[name][order], name=words, orientation="h", width=0.7,
                marker={"color": PHASE[name], "line": {"width": 0}},
                hovertemplate="%{y}: %{x:.4g} ms " + words + "<extra></extra>",
            )  # fmt: skip
    if len(total) > 1:
        figure.add_vline(
            x=float(np.median(total)), line={"dash": "dot", "width": 1.5, "color": SEQUENCE[7]},
            name="median of all ranks", showlegend=True,
        )  # fmt: skip
    figure.update_xaxes(ticksuffix=" ms")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def against_peers(work: Mapping[str, Any], *, rank: int, onset: int | None = None) -> go.Figure:
    """Draw the rank's own work over the steps. `work`: columns step, own (of the rank), and low, middle, high:
    percentiles of the others (milliseconds)."""
    low, middle, high = (floats(work[name]) for name in ("low", "middle", "high"))
    own = {f"rank {rank}": floats(work["own"])}
    comparison = RankComparison(x=ints(work["step"]), own=own, low=low, middle=middle, high=high)
    return draw(comparison, y="own work (ms)", onset=onset)
