"""Page on GPU and host health: load, memory, temperature, power, clocks, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st
from plotly.graph_objects import Figure

from analyzers.figures.drawing import series
from analyzers.figures.drawing.theme import SEQUENCE, tint
from analyzers.source import Floats, Source, floats
from dashboard.data.sql.health_queries import AT_EACH_END, Trend, device_problems, health_trends, xids
from dashboard.drawing.elements import chart, empty_state, table
from dashboard.frame import View, framed

__all__ = ["health"]

MAX_PROBLEMS = 200
_READINGS = {
    "cpu_utilization_ratio": ("Host CPU", "busy (%)", 100.0, "avg"),
    "load_1m": ("Host load (1 min)", "runnable processes", 1.0, "max"),
    "gpu_utilization_ratio": ("GPU", "busy (%)", 100.0, "avg"),
    "sm_active_ratio": ("SM active", "of the time (%)", 100.0, "avg"),
    "tensor_active_ratio": ("Tensor cores active", "of the time (%)", 100.0, "avg"),
    "memory_bandwidth_ratio": ("Memory bandwidth", "used (%)", 100.0, "avg"),
    "memory_used_bytes": ("Memory", "used (GiB)", 1 / (1 << 30), "max"),
    "temperature_celsius": ("Temperature", "°C", 1.0, "max"),
    "power_watts": ("Power", "W", 1.0, "avg"),
    "sm_clock_hertz": ("SM clock", "MHz", 1e-6, "avg"),
    "disk_free_bytes": ("Free disk", "GiB", 1 / (1 << 30), "min"),
    "ecc_corrected_total": ("Memory errors, corrected", "during the run", 1.0, "max"),
    "ecc_uncorrected_total": ("Memory errors, uncorrected", "during the run", 1.0, "max"),
    "remapped_rows_total": ("Remapped rows", "during the run", 1.0, "max"),
    "pcie_replay_total": ("PCIe replays", "packets, during the run", 1.0, "max"),
    "nvlink_errors_total": ("NVLink errors", "all links, during the run", 1.0, "max"),
    "network_errors_total": ("Network errors and drops", "all interfaces, during the run", 1.0, "max"),
    "tcp_retransmits_total": ("TCP retransmits", "during the run", 1.0, "max"),
    "infiniband_errors_total": ("InfiniBand errors", "all ports, during the run", 1.0, "max"),
    "infiniband_downs_total": ("InfiniBand links lost", "all ports, during the run", 1.0, "max"),
    "infiniband_congestion_total": ("InfiniBand congestion notifications", "all ports, during the run", 1.0, "max"),
    "cgroup_throttled_seconds_total": ("Throttled by the CPU limit", "seconds, during the run", 1.0, "max"),
    "cpu_pressure_ratio": ("Waiting for a core", "of the time (%)", 100.0, "avg"),
    "memory_pressure_ratio": ("Waiting for memory", "of the time (%)", 100.0, "avg"),
    "io_pressure_ratio": ("Waiting for a disk", "of the time (%)", 100.0, "avg"),
    "disk_read_latency_seconds": ("Disk read latency", "ms, slowest disk", 1e3, "max"),
    "disk_write_latency_seconds": ("Disk write latency", "ms, slowest disk", 1e3, "max"),
    "swapped_pages_total": ("Pages swapped", "in or out, during the run", 1.0, "max"),
}
"""{column: (title, axis label, factor to the axis unit, aggregate per time bucket)}."""
_HOST_PREFIXES = (
    "cpu_",
    "load_",
    "disk_",
    "network_",
    "tcp_",
    "infiniband_",
    "cgroup_",
    "memory_pressure_",
    "io_",
    "swapped_",
)
"""Prefixes of columns that only hosts have."""


def load_health(source: Source) -> dict[str, Any]:
    """Trends of the readings, device problems, XID errors."""
    rows, num_rows = device_problems(source, MAX_PROBLEMS)
    trends = health_trends(source, {name: joined for name, (_, _, _, joined) in _READINGS.items()})
    return {"trends": trends, "problems": rows, "num_problems": num_rows, "xids": xids(source)}


@framed("Health")
def health(view: View) -> None:
    """Draw the device problems, then a chart for each reading that any device supports."""
    data = view.ask(load_health)
    if data is None:
        return
    if not data["trends"] and not data["xids"]:
        empty_state(
            "No health was recorded in this run.",
            "`watch` samples GPUs through NVML and the host through /proc while a run trains.",
        )
        return
    _problems(data)
    trends: dict[str, Trend] = data["trends"]
    shown = [name for name in _READINGS if name in trends and trends[name].has_risen]
    for pair in range(0, len(shown), 2):
        for column, name in zip(st.columns(2, gap="medium"), shown[pair : pair + 2], strict=False):
            heading = _READINGS[name][0]
            with column:
                st.subheader(heading, anchor=False)
                chart(_reading, trends[name], name, key=f"health-{name}", what=f"{heading} over time")
                if trends[name].all_devices is not None:
                    who = "hosts" if name.startswith(_HOST_PREFIXES) else "devices"
                    num = f"{trends[name].num_devices:,}"
                    st.caption(f"Lines: the {AT_EACH_END} lowest and highest of {num} {who}. Band: all {who}.")
    unchanged = [_READINGS[name][0] for name in _READINGS if name in trends and not trends[name].has_risen]
    if unchanged:
        st.caption(f"Unchanged on all devices during the run: {', '.join(unchanged)}.")


def _problems(data: dict[str, Any]) -> None:
    if data["xids"]:
        st.subheader("XID errors", anchor=False)
        table(data["xids"], key="health-xids")
    if data["problems"]:
        st.subheader("Throttling, errors, remapped rows", anchor=False)
        table(data["problems"], key="health-problems")
        left = data["num_problems"] - len(data["problems"])
        if left > 0:
            st.caption(f"The worst first; {left:,} more devices have problems.")


def _reading(trend: Trend, name: str) -> Figure:
    """Draw one reading over time: a line per device, and with many devices the range of all as a band."""
    _, axis, factor, _ = _READINGS[name]
    shown = [
        series.Series(
            name=line.node if line.device == "host" else f"{line.node} {line.device[:12]}", x=line.at,
            y=factor * line.values,
        )
        for line in trend.lines
    ]  # fmt: skip
    bounds = trend.all_devices
    if bounds is not None:
        shown.append(
            series.Series(
                name="median of all",
                x=floats(bounds["seconds"]),
                y=factor * floats(bounds["middle"]),
                colour=SEQUENCE[7],
            )
        )
    figure = series.draw(shown, x="seconds", y=axis, height=240, from_zero=name != "temperature_celsius")
    if bounds is not None:
        _band(figure, floats(bounds["seconds"]), factor * floats(bounds["low"]), factor * floats(bounds["high"]))
    return figure


def _band(figure: Figure, at: Floats, low: Floats, high: Floats) -> None:
    """Draw the range of all devices as one closed shape."""
    figure.add_scatter(
        x=np.concatenate([at, at[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself", mode="lines",
        line={"width": 0}, fillcolor=tint(SEQUENCE[0], 0.15), name="range of all", hoverinfo="skip",
    )  # fmt: skip
