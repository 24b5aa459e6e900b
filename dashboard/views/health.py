"""GPU and host health as `watch` read it, once a second: load, memory, heat, power, clocks, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st
from plotly.graph_objects import Figure

from analyzers.report.figures import series
from analyzers.source import Source, floats

from .. import queries
from ..frame import View, framed
from ..show import chart, nothing

__all__ = ["health"]

_READINGS = {
    "cpu_utilization_ratio": ("CPU of the host", "busy (%)", 100.0),
    "load_1m": ("Load of the host", "runnable processes", 1.0),
    "gpu_utilization_ratio": ("GPU", "busy (%)", 100.0),
    "memory_used_bytes": ("Memory", "used (GiB)", 1 / (1 << 30)),
    "temperature_celsius": ("Temperature", "°C", 1.0),
    "power_watts": ("Power", "W", 1.0),
    "sm_clock_hertz": ("Clock", "MHz", 1e-6),
    "disk_free_bytes": ("Free disk", "GiB", 1 / (1 << 30)),
    "ecc_corrected_total": ("Memory errors, corrected", "since the driver was loaded", 1.0),
    "ecc_uncorrected_total": ("Memory errors, uncorrected", "since the driver was loaded", 1.0),
    "remapped_rows_total": ("Remapped rows", "rows of the device's memory", 1.0),
    "pcie_replay_total": ("PCIe replays", "packets sent again", 1.0),
    "nvlink_errors_total": ("NVLink errors", "all links", 1.0),
}
"""Column -> what it is called, its axis, its factor."""


def load_health(source: Source) -> Any:
    """Readings in pieces of time."""
    return queries.health(source)


@framed("GPU and host health")
def health(view: View) -> None:
    """A chart a reading that anybody supports, a line a device."""
    data = view.ask(load_health)
    if data is None:
        return
    if not len(data["seconds"]):
        nothing(
            "No health was recorded in this run.",
            "`watch` reads GPUs through NVML and the host through /proc while a run trains.",
        )
        return
    drawn = [name for name in _READINGS if name in data and np.isfinite(floats(data[name])).any()]
    for pair in range(0, len(drawn), 2):
        for column, name in zip(st.columns(2, gap="medium"), drawn[pair : pair + 2], strict=False):
            heading = _READINGS[name][0]
            with column:
                st.subheader(heading, anchor=False)
                chart(_reading, data, name, key=f"health-{name}", what=f"{heading} over time")


def _reading(data: queries.Columns, name: str) -> Figure:
    """One reading over time, a line a device."""
    _, axis, factor = _READINGS[name]
    device = np.asarray(data["device"], dtype=object).astype(str)
    node = np.asarray(data["node"], dtype=object).astype(str)
    values, shown = factor * floats(data[name]), []
    for of in sorted(set(zip(node.tolist(), device.tolist(), strict=True))):
        rows = (node == of[0]) & (device == of[1]) & np.isfinite(values)
        if rows.any():
            text = of[0] if of[1] == "host" else f"{of[0]} {of[1][:12]}"
            shown.append(series.Series(name=text, x=floats(data["seconds"])[rows], y=values[rows]))
    return series.draw(shown, x="seconds", y=axis, height=240, from_zero=name != "temperature_celsius")
