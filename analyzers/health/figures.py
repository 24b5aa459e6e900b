"""Figures of GPUs and hosts: the readings of a finding's device over time, against the readings of its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from analyzers.figures.drawing import focus
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.finding import Finding, evidence_of
from analyzers.health.policy import HealthPolicy
from analyzers.source import Ints, Source, floats, ints, lacking

__all__ = ["FIGURES", "GIB", "clock_of_rank", "reading_figure"]

MAX_BINS = 600
"""Maximum number of time bins."""
GIB = 1 << 30
SINCE = "since the driver was loaded"
_XID_COLUMNS = {"ecc": "ecc_uncorrected_total", "nvlink": "nvlink_errors_total", "bus": "pcie_replay_total"}
"""Class of an XID -> counter that is shown with the device's load."""
_WORDS = {
    "ecc_uncorrected_total": "Uncorrectable ECC errors", "pcie_replay_total": "PCIe replays",
    "ecc_corrected_total": "Corrected ECC errors", "remapped_rows_total": "Remapped rows",
    "infiniband_errors_total": "InfiniBand port errors", "infiniband_downs_total": "InfiniBand links lost",
    "tcp_retransmits_total": "TCP retransmits", "cgroup_throttled_seconds_total": "Throttled by the CPU limit",
    "nvlink_errors_total": "NVLink errors", "gpu_utilization_ratio": "Load", "remap_pending": "Remapping pending",
    "remap_failed": "Remapping failed",
}  # fmt: skip


def readings(
    source: Source, expression: str, node: str, device: str, *, join: str = "avg"
) -> tuple[focus.RankComparison, Ints] | None:
    """A reading of `device` and of its peers on all nodes, and the start of each time bin (ns).

    Hosts are compared with hosts, GPUs with GPUs. `x` are seconds since the first reading.
    """
    like = "device = 'host'" if device == "host" else "device <> 'host'"
    table = source.query(
        f"""
        WITH span AS (SELECT min(sample_ns) AS zero,
                             greatest(1, (max(sample_ns) - min(sample_ns)) // {MAX_BINS}) AS width FROM health)
        SELECT (sample_ns - zero) // width AS piece, min(sample_ns) AS at_ns, min(zero) AS zero_ns, node, device,
               {join}(CAST({expression} AS DOUBLE)) AS value
        FROM health, span WHERE {like} AND ({expression}) IS NOT NULL GROUP BY piece, node, device ORDER BY piece
        """
    )
    if not len(table["piece"]):
        return None
    pieces, place = np.unique(ints(table["piece"]), return_inverse=True)
    at_ns = np.full(len(pieces), np.iinfo(np.int64).max)
    np.minimum.at(at_ns, place, ints(table["at_ns"]))
    lines: dict[str, Any] = {}
    for of_node, of_device, i, value in zip(table["node"], table["device"], place, floats(table["value"]), strict=True):
        name = _label(str(of_node), str(of_device))
        lines.setdefault(name, np.full(len(pieces), np.nan))[i] = value
    if _label(node, device) not in lines:
        return None
    seconds = (at_ns - ints(table["zero_ns"]).min()) / 1e9
    return focus.RankComparison.of_lines(seconds, lines, {_label(node, device)}), at_ns


def _label(node: str, device: str) -> str:
    return node if device == "host" else f"{node} {device}"


def _place(finding: Finding) -> tuple[str, str]:
    """Node and device that a finding of `health` is about; a host counts as a device."""
    return str(finding.evidence.get("node") or ""), str(finding.evidence.get("device") or "host")


def reading_figure(
    source: Source, expression: str, place: tuple[str, str], *, title: str, y: str, join: str = "avg",
    rises: bool = False, onset_ns: int | None = None, **more: Any,
) -> Iterator[Drawing]:  # fmt: skip
    """One reading of a device (node, device) against its peers. `rises`: mark the onset at its first rise."""
    node, device = place
    found = readings(source, expression, node, device, join=join)
    if found is None:
        return
    comparison, at_ns = found
    (own,) = comparison.own.values()
    onset = None
    if onset_ns is not None:
        onset = float((onset_ns - int(at_ns[0])) / 1e9) + float(comparison.x[0])
    elif rises:
        there = np.flatnonzero(np.isfinite(own))
        higher = there[own[there] > own[there[0]]] if len(there) else there
        onset = float(comparison.x[higher[0]]) if len(higher) else None
    figure = focus.draw(comparison, x="seconds", y=y, onset=onset, others="others, min to max", **more)
    yield Drawing(title=f"{title} of {_label(node, device)}", figure=figure)


def xid(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The counter that belongs to the code, if any, and the device's load, with the time of the first message."""
    columns = [_XID_COLUMNS[finding.cause]] if finding.cause in _XID_COLUMNS else []
    for column in (*columns, "gpu_utilization_ratio"):
        if lacking(source, health=(column,)):
            continue
        ratio = column.endswith("_ratio")
        yield from reading_figure(
            source, f"100 * {column}" if ratio else column, _place(finding), title=_WORDS[column],
            y="busy (%)" if ratio else SINCE, join="avg" if ratio else "max",
            onset_ns=evidence_of(finding).get("first_wall_ns"),
        )  # fmt: skip


def memory_errors(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The counters of memory errors or of remapped rows."""
    columns = {"uncorrected": ("ecc_uncorrected_total",), "corrected": ("ecc_corrected_total",),
               "remap_failed": ("remap_failed", "remapped_rows_total"),
               "remapped": ("remapped_rows_total", "remap_pending")}  # fmt: skip
    for column in columns.get(finding.cause, ()):
        yield from _counter(source, finding, column)


def throttled(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Share of readings in which the throttle reason was active, then clock and temperature."""
    bit = int(evidence_of(finding).get("reason_bit") or 0)
    if not lacking(source, health=("throttle_reasons",)):
        share = f"CASE WHEN throttle_reasons & {bit} <> 0 THEN 100.0 ELSE 0.0 END"
        yield from reading_figure(
            source, share, _place(finding), title="Slowed down", y="of the readings (%)", rises=True
        )
    for column, title, y in (
        ("sm_clock_hertz / 1e6", "Clock", "MHz"), ("temperature_celsius", "Temperature", "degrees Celsius"),
    ):  # fmt: skip
        if not lacking(source, health=(column.partition(" ")[0],)):
            yield from reading_figure(source, column, _place(finding), title=title, y=y, from_zero=False)


def link_errors(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The counter of the link's errors."""
    columns = {"nvlink": "nvlink_errors_total", "infiniband": "infiniband_errors_total",
               "infiniband_down": "infiniband_downs_total", "tcp": "tcp_retransmits_total"}  # fmt: skip
    yield from _counter(source, finding, columns.get(finding.cause, "pcie_replay_total"))


def _counter(source: Source, finding: Finding, column: str) -> Iterator[Drawing]:
    """A counter over the run; nothing if not recorded."""
    if not lacking(source, health=(column,)):
        yield from reading_figure(
            source, column, _place(finding), title=_WORDS[column], y=SINCE, join="max", rises=True
        )


def pressure(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The reading of the finding, with its limit if it has one: disk space or latency, CPU limit, memory, or load."""
    if finding.cause == "disk" and not lacking(source, health=("disk_free_bytes",)):
        least = HealthPolicy().disk_free_bytes / GIB
        yield from reading_figure(
            source, f"disk_free_bytes / {GIB}.0", _place(finding), title="Free disk", y="GiB", join="min",
            limit=(least, f"{least:g} GiB: a checkpoint may not fit"),
        )  # fmt: skip
    elif finding.cause == "cpu_limit":
        yield from _counter(source, finding, "cgroup_throttled_seconds_total")
    elif finding.cause == "memory" and not lacking(source, health=("memory_pressure_ratio",)):
        yield from reading_figure(
            source, "100 * memory_pressure_ratio", _place(finding), title="Waiting for memory", y="of the time (%)"
        )
    elif finding.cause == "disk_latency" and finding.evidence.get("request") in ("read", "write"):
        column, limit = f"disk_{finding.evidence['request']}_latency_seconds", 1e3 * HealthPolicy().disk_latency_s
        if not lacking(source, health=(column,)):
            yield from reading_figure(
                source, f"1000 * {column}", _place(finding), title=f"Time of a {finding.evidence['request']}", y="ms",
                join="max", limit=(limit, f"{limit:g} ms"),
            )  # fmt: skip
    elif finding.cause == "run_queue" and not lacking(source, health=("load_1m",)):
        cpus = float(evidence_of(finding).get("num_cpus") or 0)
        yield from reading_figure(
            source, "load_1m", _place(finding), title="Load", y="runnable processes",
            limit=(cpus, f"{cpus:g} CPUs") if cpus else None,
        )  # fmt: skip


def clock_of_rank(source: Source, rank: int) -> Iterator[Drawing]:
    """The clock of a rank's GPU, compared with the GPUs of the other ranks."""
    if lacking(source, health=("sm_clock_hertz",), ranks=("device_uuid",)):
        return
    found = source.rows(
        "SELECT arg_max(host, wall_ns), arg_max(device_uuid, wall_ns) FROM ranks WHERE rank = ? HAVING count(*) > 0",
        [rank],
    )
    for node, device in found:
        yield from reading_figure(
            source, "sm_clock_hertz / 1e6", (str(node), str(device)), title="Clock", y="MHz", from_zero=False
        )


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "xid": (xid,),
    "gpu_memory_errors": (memory_errors,),
    "gpu_throttled": (throttled,),
    "link_errors": (link_errors,),
    "host_pressure": (pressure,),
}
