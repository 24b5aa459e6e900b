"""What communication achieves: bandwidth by operation, size and group.

figure = draw(queries.collectives(store))

A point is an operation of one size in one group: how large its input is, how many bytes a second cross the bus while
it travels (the slowest link's work: 2 (N-1)/N of an all-reduce's input, (N-1)/N of a gather's or scatter's output),
and how much waiting it causes (the area).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...source import floats
from .theme import SEQUENCE, label, new_figure

__all__ = ["draw"]

MAX_OPS = 8
MAX_PER_OP = 600


def draw(calls: Mapping[str, Any]) -> go.Figure:
    """`calls`: columns op, process_group, bytes, num_calls, transfer_ms, bus_gb_per_s, wait_s."""
    figure = new_figure(height=360, x="bytes of a call", y="bus bandwidth (bytes/s)")
    ops = np.asarray(calls["op"], dtype=object).astype(str)
    bandwidth, size, wait = (floats(calls[name]) for name in ("bus_gb_per_s", "bytes", "wait_s"))
    good = np.isfinite(bandwidth) & (bandwidth > 0) & (size > 0)
    most = float(np.nanmax(wait[good])) if good.any() else 1.0
    for number, op in enumerate(dict.fromkeys(ops[good].tolist())):
        rows = np.flatnonzero(good & (ops == op))[:MAX_PER_OP]
        if number >= MAX_OPS:
            break
        figure.add_scatter(
            x=size[rows], y=1e9 * bandwidth[rows], mode="markers", name=label(op, 24),
            marker={
                "size": 7 + 26 * np.sqrt(np.nan_to_num(wait[rows]) / (most or 1.0)), "opacity": 0.75,
                "color": SEQUENCE[number % len(SEQUENCE)], "line": {"width": 0},
            },
            hovertext=[_told(calls, i) for i in rows], hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(type="log", exponentformat="SI", dtick=1)
    figure.update_yaxes(type="log", exponentformat="SI", dtick=1)
    return figure


def _told(calls: Mapping[str, Any], row: int) -> str:
    return (
        f"{label(calls['op'][row], 24)} in {label(calls['process_group'][row], 60)}<br>"
        f"{int(calls['num_calls'][row]):,} calls of {int(calls['bytes'][row]):,} bytes<br>"
        f"transfer {float(calls['transfer_ms'][row]):.3g} ms, waited {float(calls['wait_s'][row]):.3g} s in all"
    )
