"""The newest readings of a node's devices and host, as samples for `/metrics`.

    samples = list(health_samples(store))

Device UUIDs join the samples to ranks through `rankscope_rank_info`. A reading that a device does not support is NULL
in the table and omitted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzers.health.analyze import THROTTLE_BITS
from analyzers.health.xids import xid_table
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds
from watch.exporting.metrics.catalogue import Sample

__all__ = ["health_samples"]

_HOST = {
    "cpu_utilization_ratio": "host_cpu_utilization_ratio",
    "load_1m": "host_load",
    "memory_used_bytes": "host_memory_used_bytes",
    "memory_total_bytes": "host_memory_total_bytes",
    "swapped_pages_total": "host_swapped_pages_total",
    "network_errors_total": "host_network_errors_total",
    "disk_free_bytes": "disk_free_bytes",
    "tcp_segments_total": "host_tcp_segments_total",
    "tcp_retransmits_total": "host_tcp_retransmits_total",
    "cpu_pressure_ratio": "host_cpu_pressure_ratio",
    "memory_pressure_ratio": "host_memory_pressure_ratio",
    "io_pressure_ratio": "host_io_pressure_ratio",
    "disk_read_latency_seconds": "host_disk_read_latency_seconds",
    "disk_write_latency_seconds": "host_disk_write_latency_seconds",
    "cgroup_throttled_seconds_total": "host_cgroup_throttled_seconds_total",
    "infiniband_errors_total": "host_infiniband_errors_total",
    "infiniband_downs_total": "host_infiniband_downs_total",
    "infiniband_congestion_total": "host_infiniband_congestion_total",
}
_DEVICE = {
    "gpu_utilization_ratio": "gpu_utilization_ratio",
    "sm_active_ratio": "gpu_sm_active_ratio",
    "tensor_active_ratio": "gpu_tensor_active_ratio",
    "memory_bandwidth_ratio": "gpu_memory_bandwidth_ratio",
    "memory_used_bytes": "gpu_memory_used_bytes",
    "memory_total_bytes": "gpu_memory_total_bytes",
    "temperature_celsius": "gpu_temperature_celsius",
    "power_watts": "gpu_power_watts",
    "energy_joules": "gpu_energy_joules_total",
    "sm_clock_hertz": "gpu_sm_clock_hertz",
    "ecc_corrected_total": "gpu_ecc_corrected_total",
    "ecc_uncorrected_total": "gpu_ecc_uncorrected_total",
    "remapped_rows_total": "gpu_remapped_rows_total",
    "remap_pending": "gpu_remap_pending",
    "remap_failed": "gpu_remap_failed",
    "pcie_replay_total": "gpu_pcie_replays_total",
    "nvlink_errors_total": "gpu_nvlink_errors_total",
}


def health_samples(source: Source) -> Iterator[Sample]:
    """One sample per device and reading, and the number of XID errors so far."""
    yield from _readings(source)
    yield from _xids(source)


def _readings(source: Source) -> Iterator[Sample]:
    if missing_tables(source, "health"):
        return
    columns = [*dict.fromkeys([*_HOST, *_DEVICE]), "throttle_reasons"]
    for device, *values in source.rows(
        f"SELECT device, {', '.join(f'arg_max({column}, sample_ns)' for column in columns)} FROM health "
        "WHERE device IS NOT NULL AND sample_ns > (SELECT max(sample_ns) FROM health) - 30000000000 "
        "GROUP BY device ORDER BY device"
    ):
        reading = dict(zip(columns, values, strict=True))
        labels = {} if device == "host" else {"device": str(device)}
        for column, name in (_DEVICE if labels else _HOST).items():
            if reading[column] is not None:
                yield Sample(f"rankscope_{name}", float(reading[column]), labels)
        if labels and reading["throttle_reasons"] is not None:
            active = {cause for bit, (cause, _) in THROTTLE_BITS.items() if int(reading["throttle_reasons"]) & bit}
            for reason in sorted({cause for cause, _ in THROTTLE_BITS.values()}):
                yield Sample("rankscope_gpu_throttled", float(reason in active), {**labels, "reason": reason})


def _xids(source: Source) -> Iterator[Sample]:
    seen: dict[tuple[str, int], list[int]] = {}
    for event in EventLog.load(source, (event_kinds.XID,)).of(event_kinds.XID):
        seen.setdefault((event.text("device"), event.integer("xid")), []).append(event.wall_ns)
    for (device, code), times in sorted(seen.items()):
        known = xid_table()["xid"].get(str(code), {})
        labels = {"device": device, "xid": str(code), "class": str(known.get("class", "unknown"))}
        yield Sample("rankscope_gpu_xid_total", len(times), labels)
        yield Sample("rankscope_gpu_last_xid_timestamp_seconds", max(times) / 1e9, labels)
