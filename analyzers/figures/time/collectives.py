"""Bandwidth of collectives by operation, size and group.

figure = draw(bandwidth.call_columns(store))
figure = waits(bandwidth.call_columns(store))

A point is an operation of one size in one group. Its coordinates are the size of a rank's input and the bus bandwidth
(`communication.bandwidth`); its area grows with the waiting in these calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analyzers.figures.drawing.theme import CALL, SEQUENCE, label, new_figure
from analyzers.source import Floats, floats
from analyzers.wording import group_text, natural

__all__ = ["draw", "waits"]

MAX_OPS = 8
MAX_PER_OP = 600
MAX_NAME_CHARS = 30
"""If a name is longer, all names have two lines: long names leave no room for bars on a narrow screen."""
MAX_BARS = 14
AXIS_ROOM, FEW_DECADES = 0.2, 2.5
"""Decades of room on each side of the points; number of decades below which there are ticks within a decade."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def draw(calls: Mapping[str, Any]) -> go.Figure:
    """`calls`: columns op, process_group, bytes, num_calls, transfer_ms, bus_gb_per_s, wait_s."""
    figure = new_figure(height=360, x="bytes of a call", y="bus bandwidth (bytes/s)")
    ops = np.asarray(calls["op"], dtype=object).astype(str)
    bandwidth, size, wait = (floats(calls[name]) for name in ("bus_gb_per_s", "bytes", "wait_s"))
    good = np.isfinite(bandwidth) & (bandwidth > 0) & (size > 0)
    most = float(np.max(wait, initial=0.0, where=good & np.isfinite(wait)))
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
            hovertext=[_hover(calls, i) for i in rows], hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    if good.any():
        figure.update_xaxes(**_log_axis(size[good]))
        figure.update_yaxes(**_log_axis(1e9 * bandwidth[good]))
    return figure


def _log_axis(values: Floats) -> dict[str, Any]:
    """A logarithmic axis with room for the points. It has ticks at 1, 2 and 5 if it has few decades."""
    low, high = np.log10(values.min()) - AXIS_ROOM, np.log10(values.max()) + AXIS_ROOM
    digits = (1, 2, 5) if high - low < FEW_DECADES else (1,)
    powers = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits if low <= power + np.log10(digit) <= high]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": [_si(tick) for tick in ticks]}


def _si(value: float) -> str:
    """Number with an SI prefix: `200 M`."""
    scale, prefix = next((one for one in _PREFIXES if value >= one[0]), (1.0, ""))
    return f"{value / scale:g} {prefix}".rstrip()


def _hover(calls: Mapping[str, Any], row: int) -> str:
    wait_s = floats(calls["wait_s"])[row]
    waited = f", waited {wait_s:.3g} s in all" if np.isfinite(wait_s) else ""
    return (
        f"{label(calls['op'][row], 24)} in {label(group_text(str(calls['process_group'][row])), 60)}<br>"
        f"{int(calls['num_calls'][row]):,} calls of {int(calls['bytes'][row]):,} bytes<br>"
        f"transfer {float(calls['transfer_ms'][row]):.3g} ms{waited}"
    )


def waits(calls: Mapping[str, Any]) -> go.Figure:
    """Seconds of measured waiting, summed over all ranks, by operation and group; the largest first."""
    total: dict[tuple[str, str], float] = {}
    for op, group, wait in zip(calls["op"], calls["process_group"], floats(calls["wait_s"]), strict=True):
        if np.isfinite(wait):
            key = (str(op), str(group))
            total[key] = total.get(key, 0.0) + float(wait)
    most = sorted(total.items(), key=lambda item: (-item[1], natural(" ".join(item[0]))))[:MAX_BARS]
    x = "seconds waited, all ranks"
    if len(most) < len(total):
        x += f"<br>the {len(most)} longest of {len(total):,}"
    parts = [(label(op, 20), label(group_text(group), 26)) for (op, group), _ in most]
    is_long = any(len(op) + len(group) > MAX_NAME_CHARS for op, group in parts)
    names = [("<br>" if is_long else " · ").join(part) for part in parts]
    figure = new_figure(height=int(110 + (36 if is_long else 28) * len(most)), x=x, showlegend=False)
    figure.add_bar(
        y=names, x=[wait for _, wait in most], orientation="h", width=0.66,
        marker={"color": [CALL.get(op, SEQUENCE[7]) for (op, _), _ in most], "line": {"width": 0}},
        text=[f"{wait:,.0f} s" if wait >= 100 else f"{wait:.3g} s" for _, wait in most],
        textposition="auto", textangle=0, insidetextanchor="end", constraintext="none", cliponaxis=False,
        hovertemplate="%{y}: %{x:.4g} s<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(range=[0, 1.15 * max((wait for _, wait in most), default=1.0)], ticksuffix=" s")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
