"""Health readings for the page: lines of devices, bounds of all devices, throttling, errors and XIDs.

found = health_trends(store, {"temperature_celsius": "max"})
found["temperature_celsius"].lines           # one line per device; if there are many, the outliers
found["temperature_celsius"].all_devices     # minimum, median and maximum of all, per bucket
device_problems(store, 200), xids(store)     # rows for tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.health.analyze import THROTTLE_BITS
from analyzers.health.xids import xid_table
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Floats, Source, floats, ints, missing_tables
from analyzers.wording import natural
from dashboard.data.sql.queries import Columns
from probes.tape import event_kinds

__all__ = ["AT_EACH_END", "MAX_DRAWN", "Line", "Trend", "device_problems", "health_trends", "xids"]

MAX_PIECES, MIN_PIECES = 600, 100
MAX_CELLS = 400_000
"""Maximum number of time buckets over all devices."""
MAX_DRAWN, AT_EACH_END = 16, 3
"""Maximum number of devices that each get a line; with more devices, only the devices with the lowest and highest
values do.
"""
REASONS = {1: "idle", 2: "clocks set by hand", 4: "power cap", 16: "sync boost", 256: "display clocks"} | {
    bit: words for bit, (_, words) in THROTTLE_BITS.items()
}
"""Names of NVML's clock event reasons."""
TOTALS = {
    "ecc_uncorrected_total": "memory errors, uncorrected", "ecc_corrected_total": "memory errors, corrected",
    "remapped_rows_total": "remapped rows", "pcie_replay_total": "PCIe replays",
    "nvlink_errors_total": "NVLink errors", "network_errors_total": "network errors",
    "infiniband_errors_total": "InfiniBand errors", "infiniband_downs_total": "InfiniBand links lost",
    "swapped_pages_total": "pages swapped",
}  # fmt: skip
"""Counters that increase only if the device has a problem."""
_COUNTER_SUFFIX = "_total"
"""Suffix of the names of counters, which start before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One device's reading; `at` in seconds since the first reading of the run."""

    node: str
    device: str
    at: Floats
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One reading; a counter is shown as its increase since the device's first reading. `all_devices`: seconds, low,
    middle, high.
    """

    lines: Sequence[Line]
    num_devices: int
    all_devices: Columns | None = None
    has_risen: bool = True
    """False for a counter that did not change on any device during the run."""


def health_trends(source: Source, readings: Mapping[str, str]) -> dict[str, Trend]:
    """Trends of the readings ({column: `avg`, `max` or `min` of a bucket}) that any device supports.

    1. DuckDB reduces each device's readings to time buckets. The more devices there are, the fewer buckets each gets.
    2. Each reading becomes a matrix device x bucket. From counters, the minimum during the run is subtracted.
    3. With many devices, those with the smallest and the largest values get a line, and bounds per bucket cover all
       devices.
    """
    if missing_tables(source, "health"):
        return {}
    supported = ", ".join(f"count({name})" for name in readings)
    ((first_ns, last_ns, num_devices, *counts),) = source.rows(
        f"SELECT min(sample_ns), max(sample_ns), count(DISTINCT (node, device)), {supported} FROM health "
        "WHERE sample_ns IS NOT NULL"
    )
    names = [name for name, count in zip(readings, counts, strict=True) if count]
    if not names:
        return {}
    pieces = max(MIN_PIECES, min(MAX_PIECES, MAX_CELLS // max(1, num_devices)))
    width = max(1, -(-(last_ns - first_ns + 1) // pieces))
    joined = ", ".join(f"CAST({readings[name]}({name}) AS DOUBLE) AS {name}" for name in names)
    counters = [name for name in names if name.endswith(_COUNTER_SUFFIX)]
    least = ", ".join(f"CAST(min({name}) AS DOUBLE) AS least_{name}" for name in counters)
    table = source.query(
        f"""
        SELECT coalesce(node, '') AS node, coalesce(device, '') AS device, (sample_ns - {first_ns}) // {width} AS piece,
               min(sample_ns - {first_ns}) / 1e9 AS began, {", ".join(part for part in (joined, least) if part)}
        FROM health WHERE sample_ns IS NOT NULL GROUP BY ALL ORDER BY 1, 2, 3
        """
    )
    node, device = table["node"], table["device"]
    is_new = np.ones(len(node), dtype=bool)
    is_new[1:] = (node[1:] != node[:-1]) | (device[1:] != device[:-1])
    devices = [(str(node[i]), str(device[i])) for i in np.flatnonzero(is_new)]
    row, column = np.cumsum(is_new) - 1, ints(table["piece"])
    seconds = np.full(column.max() + 1, np.inf)
    np.minimum.at(seconds, column, floats(table["began"]))
    found = {}
    for name in names:
        grid = np.full((len(devices), len(seconds)), np.nan)
        grid[row, column] = floats(table[name])
        if name in counters:
            first = np.full(grid.shape, np.nan)
            first[row, column] = floats(table[f"least_{name}"])
            grid -= np.fmin.reduce(first, axis=1, keepdims=True)
        grid[~np.isfinite(grid)] = np.nan
        found[name] = _trend(grid, seconds, devices, is_counter=name in counters)
    return {name: trend for name, trend in found.items() if trend.num_devices}


def _trend(grid: Floats, seconds: Floats, devices: Sequence[tuple[str, str]], *, is_counter: bool) -> Trend:
    """Lines of the devices (only of outliers if there are many), and the bounds of all devices. `grid`: device x
    bucket, NaN without a reading.
    """
    largest = np.fmax.reduce(grid, axis=1)
    rows = np.flatnonzero(np.isfinite(largest))  # rows of the devices that have at least one reading
    draws_all = len(rows) <= MAX_DRAWN
    shown = set(rows.tolist())
    if not draws_all:  # choose by maximum and minimum: a clock that drops late has the same maximum as the others
        lowest, highest = np.fmin.reduce(grid, axis=1)[rows], largest[rows]
        ends = (np.argsort(lowest, kind="stable")[:AT_EACH_END], np.argsort(highest, kind="stable")[-AT_EACH_END:])
        shown = set(rows[np.concatenate(ends)].tolist())
    lines = []
    for row in sorted(shown, key=lambda row: [natural(name) for name in devices[row]]):
        node, device = devices[row]
        is_read = np.isfinite(grid[row])
        lines.append(Line(node=node, device=device, at=seconds[is_read], values=grid[row][is_read]))
    return Trend(
        lines=lines, num_devices=len(rows), all_devices=None if draws_all else _bounds(grid[rows], seconds),
        has_risen=not is_counter or bool((largest[rows] > 0).any()),
    )  # fmt: skip


def _bounds(grid: Floats, seconds: Floats) -> Columns:
    """Minimum, median and maximum of each bucket in which a device has a reading."""
    is_read = np.isfinite(grid).any(axis=0)
    values = grid[:, is_read]
    return {
        "seconds": seconds[is_read], "low": np.nanmin(values, axis=0), "middle": np.nanmedian(values, axis=0),
        "high": np.nanmax(values, axis=0),
    }  # fmt: skip


def device_problems(source: Source, limit: int) -> tuple[list[dict[str, Any]], int]:
    """One row per device that was throttled, counted errors or has rows to remap, worst first; and the number of such
    devices.

    The power cap alone is not a problem: under full load it is always on.
    """
    if missing_tables(source, "health"):
        return [], 0
    shares = ", ".join(f"avg(CAST(throttle_reasons & {bit} > 0 AS DOUBLE))" for bit in REASONS)
    rises = ", ".join(f"CAST(max({name}) - min({name}) AS BIGINT), CAST(max({name}) AS BIGINT)" for name in TOTALS)
    rows = []
    for node, device, pending, failed, *numbers in source.rows(
        f"SELECT node, device, bool_or(remap_pending), bool_or(remap_failed), {shares}, {rises} FROM health "
        "GROUP BY node, device"
    ):
        shares_by_bit = dict(zip(REASONS, numbers, strict=False))
        totals = numbers[len(REASONS) :]
        counted = dict(zip(TOTALS.values(), zip(totals[::2], totals[1::2], strict=True), strict=True))
        throttled = {REASONS[bit]: share for bit, share in shares_by_bit.items() if share and bit in THROTTLE_BITS}
        reasons = {REASONS[bit]: share for bit, share in shares_by_bit.items() if share and bit != 1}
        during = {name: rise for name, (rise, _) in counted.items() if rise}
        before = {
            name: total - (rise or 0)
            for name, (rise, total) in counted.items()
            if name in _LASTING and total and total > (rise or 0)
        }
        if not (throttled or during or before or pending or failed):
            continue
        badness = (bool(failed), bool(pending), bool(during.get("memory errors, uncorrected")),
                   max(throttled.values(), default=0.0), sum(during.values()))  # fmt: skip
        remapping = "a row could not be remapped" if failed else "pending until the next reset" if pending else ""
        unread = "not read" if all(rise is None for rise, _ in counted.values()) else ""
        row = {
            "node": node or "", "device": device or "",
            "throttled by": ", ".join(f"{name} ({_percent(share)})" for name, share in reasons.items()),
            "remapping": remapping or ("not read" if device != "host" and pending is None else ""),
            "during the run": ", ".join(f"{name} {rise:,}" for name, rise in during.items()) or unread,
            "before the run": ", ".join(f"{name} {total:,}" for name, total in before.items()) or unread,
        }  # fmt: skip
        rows.append((badness, row))
    rows.sort(key=lambda found: (found[0], found[1]["node"], found[1]["device"]), reverse=True)
    return [row for _, row in rows[:limit]], len(rows)


_LASTING = ("memory errors, uncorrected", "remapped rows")
"""Counters that are also shown for errors before the run, since the damage is permanent."""


def xids(source: Source) -> list[dict[str, Any]]:
    """One row per device and XID code, newest first."""
    table = xid_table()["xid"]
    seen: dict[tuple[str, str, int], list[Event]] = {}
    for event in EventLog.load(source, (event_kinds.XID,)).of(event_kinds.XID):
        seen.setdefault((event.text("node"), event.text("device"), event.integer("xid")), []).append(event)
    newest = sorted(seen.items(), key=lambda found: found[1][-1].wall_ns, reverse=True)
    return [
        {
            "node": node, "device": device, "XID": code, "times": len(events), "attempt": events[-1].attempt,
            "class": str(table.get(str(code), {}).get("class", "unknown")),
            "meaning": str(table.get(str(code), {}).get("meaning", "not in the table of known codes")),
        }
        for (node, device, code), events in newest
    ]  # fmt: skip


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} % of the time" if ratio < 0.995 else "all the time"
