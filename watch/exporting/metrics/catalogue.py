"""The catalogue of all metrics: name, kind, unit, labels, help.

    METRICS["rankscope_step"].help
    Sample("rankscope_rank_step_duration_seconds", 0.041, {"rank": "3"})

`/metrics`, OTLP, `docs/metrics.md` and the tests of rules and Grafana's dashboards all read this table. Names follow
Prometheus: base units, `_total` for counters, timestamps instead of ages. All samples also have the labels `run_id` and
`node`.

    python -m watch.exporting.metrics.catalogue > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["COMMON_LABELS", "METRICS", "Metric", "Sample", "document"]

Kind = Literal["gauge", "counter", "info"]
COMMON_LABELS = ("run_id", "node")
_UNITS = {
    "seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W", "joules": "J", "hertz": "Hz",
    "flops": "{FLOP}", "": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. `unit` is the suffix of its name (empty for a bare number); `group`: heading in the documentation."""

    name: str
    kind: Kind
    unit: str
    group: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def otel_name(self) -> str:
        """OpenTelemetry's name, dotted and without unit and `_total`: `rankscope.rank.step.duration`."""
        stem = self.name.removesuffix("_total").removesuffix(f"_{self.unit}" if self.unit else "")
        return stem.replace("_", ".")

    @property
    def otel_unit(self) -> str:
        """The unit in the notation of UCUM (Unified Code for Units of Measure), which OpenTelemetry uses."""
        return _UNITS[self.unit]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with its labels in any order."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _group(group: str, *rows: tuple[str, Kind, str, tuple[str, ...], str]) -> list[Metric]:
    return [
        Metric(name=f"rankscope_{name}", kind=kind, unit=unit, labels=labels, help=text, group=group)
        for name, kind, unit, labels, text in rows
    ]


_RANK = ("rank",)
_GPU = ("device",)
_ALL: tuple[Metric, ...] = (
    *_group(
        "Run",
        ("run_info", "info", "", ("name", "mesh", "device", "version"), "The run's settings."),
        ("run_links_info", "info", "", ("dashboard", "runbook"),
         "Addresses of the dashboard and the runbook, from the settings."),
        ("run_state", "gauge", "", ("state",),
         "1 for the state of the run, 0 for the others."),
        ("run_start_timestamp_seconds", "gauge", "seconds", (), "When the run was launched for the first time."),
        ("world_size", "gauge", "", (), "Number of ranks in the newest attempt."),
        ("attempt", "gauge", "", (), "Number of the newest attempt, from 0: restarts of the worker group."),
        ("step", "gauge", "", (), "Newest step that every rank of this node has finished."),
        ("last_step_timestamp_seconds", "gauge", "seconds", (), "When the newest step ended."),
        ("stall_limit_seconds", "gauge", "seconds", (), "Silence after which ranks count as stalled, in this phase."),
        ("steps_total", "counter", "", (), "Steps whose result was kept."),
        ("steps_discarded_total", "counter", "", (), "Steps that were refused, or lost with a rollback or restart."),
        ("tokens_total", "counter", "", (),
         "Tokens in the kept steps of this node's ranks; a batch that several ranks share is counted once."),
        ("tokens_per_second", "gauge", "", (),
         "Tokens per second of wall time on this node's ranks, in the newest steps; a shared batch is counted once."),
        ("step_duration_seconds", "gauge", "seconds", ("stat",),
         "Duration of the newest steps over ranks and steps; stat: min, median, max."),
    ),
    *_group(
        "Learning",
        ("loss", "gauge", "", (), "Loss of the newest step, in nats."),
        ("validation_loss", "gauge", "", ("set",),
         "Loss of the newest evaluation, in nats; set: name of a validation set, empty for their mean."),
        ("logged_value", "gauge", "", ("name",), "Newest `rankscope.log(NAME=...)`, mean over the ranks."),
        ("grad_norm", "gauge", "", (), "Global gradient norm of the newest step, before clipping."),
        ("learning_rate", "gauge", "", (), "Learning rate of the newest step."),
        ("expert_load_ratio", "gauge", "ratio", ("stat",),
         "Tokens routed to an expert on this node, relative to an even share (1); stat: min, max over experts."),
        ("expert_dropped_ratio", "gauge", "ratio", (), "Share of expert choices above the expert's capacity."),
    ),
    *_group(
        "Time",
        ("time_seconds", "gauge", "seconds", ("category",),
         "Wall time of the run by category, mean over the ranks; the categories add up to the wall time."),
        ("goodput_ratio", "gauge", "ratio", (), "Share of the wall time in which ranks computed kept steps."),
        ("exposed_communication_ratio", "gauge", "ratio", (), "Share of the newest steps spent blocked in transfers."),
        ("bubble_ratio", "gauge", "ratio", (), "Share of the run in which a stage of the pipeline had no work."),
        ("bubble_planned_ratio", "gauge", "ratio", (),
         "Share of a step that the pipeline's schedule leaves idle with equal stages, where it has a closed form."),
        ("data_wait_ratio", "gauge", "ratio", (), "Share of the newest steps spent waiting for data."),
    ),
    *_group(
        "Ranks",
        ("rank_info", "info", "", ("rank", "local_rank", "host", "gpu_uuid"),
         "Host and GPU of a rank, to join with dcgm-exporter by UUID."),
        ("rank_up", "gauge", "", _RANK, "1 while the rank is alive, 0 once it has died; absent once it has finished."),
        ("rank_step", "gauge", "", _RANK, "Newest step that the rank has finished."),
        ("rank_step_duration_seconds", "gauge", "seconds", _RANK, "Median duration of the rank's newest steps."),
        ("rank_own_seconds", "gauge", "seconds", _RANK,
         "Median step time without waiting in collectives; larger on a straggler."),
        ("rank_memory_bytes", "gauge", "bytes", _RANK, "Memory of the process, or allocated on its device."),
        ("rank_last_record_timestamp_seconds", "gauge", "seconds", _RANK, "When the rank last ended a step."),
        ("straggler_excess_ratio", "gauge", "ratio", ("rank", "cause"),
         "Excess of a straggler's step time over its peers', while the finding is open."),
    ),
    *_group(
        "Findings",
        ("findings", "gauge", "", ("kind", "severity"), "Findings that are open now."),
        ("finding_info", "info", "", ("kind", "severity", "culprit", "cause"),
         "A finding that is open now, with the ranks that it names and its cause in words."),
        ("findings_total", "counter", "", ("kind", "severity"), "Findings that fired since the start of the run."),
        ("last_finding_timestamp_seconds", "gauge", "seconds", ("kind",), "When a finding of this kind last fired."),
    ),
    *_group(
        "Recovery",
        ("rollbacks_total", "counter", "", (), "Rollbacks to an earlier step."),
        ("restarts_total", "counter", "", (), "Attempts after the first."),
        ("batches_skipped_total", "counter", "", (), "Batches that were skipped."),
        ("rank_deaths_total", "counter", "", (), "Ranks that ended by a signal, an exception or an exit code."),
        ("last_rollback_timestamp_seconds", "gauge", "seconds", (), "When the last rollback happened."),
    ),
    *_group(
        "Checkpoints",
        ("checkpoint_step", "gauge", "", ("tier",), "Step of the newest checkpoint of a tier: memory, disk."),
        ("checkpoint_timestamp_seconds", "gauge", "seconds", ("tier",), "When that checkpoint was complete."),
        ("checkpoint_good_timestamp_seconds", "gauge", "seconds", (), "When a disk checkpoint was last marked good."),
        ("checkpoint_stall_seconds", "gauge", "seconds", ("tier",), "Training stall due to the newest checkpoint."),
        ("checkpoint_bytes", "gauge", "bytes", ("tier",), "Size of the newest checkpoint over all shards."),
        ("checkpoint_failures_total", "counter", "", (), "Saves that failed."),
        ("checkpoint_interval_steps", "gauge", "", (), "Steps between checkpoints on disk, by the configuration."),
    ),
    *_group(
        "Devices",
        ("gpu_utilization_ratio", "gauge", "ratio", _GPU, "Share of time in which any kernel ran, even a small one."),
        ("gpu_memory_used_bytes", "gauge", "bytes", _GPU, "Memory in use on the device."),
        ("gpu_memory_total_bytes", "gauge", "bytes", _GPU, "Memory of the device."),
        ("gpu_temperature_celsius", "gauge", "celsius", _GPU, "Core temperature."),
        ("gpu_power_watts", "gauge", "watts", _GPU, "Power draw."),
        ("gpu_sm_clock_hertz", "gauge", "hertz", _GPU, "SM clock frequency."),
        ("gpu_sm_active_ratio", "gauge", "ratio", _GPU, "SM active: share of time in which the SMs had work."),
        ("gpu_tensor_active_ratio", "gauge", "ratio", _GPU, "Share of time in which the tensor cores were active."),
        ("gpu_memory_bandwidth_ratio", "gauge", "ratio", _GPU, "Share of the memory bandwidth in use."),
        ("gpu_energy_joules_total", "counter", "joules", _GPU, "Energy used since the driver was loaded."),
        ("gpu_throttled", "gauge", "", ("device", "reason"),
         "1 while the clock is throttled for this reason: thermal, power, hardware."),
        ("gpu_xid_total", "counter", "", ("device", "xid", "class"), "XID errors since the start of the run."),
        ("gpu_last_xid_timestamp_seconds", "gauge", "seconds", ("device", "xid", "class"),
         "When the last XID error was reported."),
        ("gpu_remapped_rows_total", "counter", "", _GPU, "Rows of the device's memory that were remapped."),
        ("gpu_remap_pending", "gauge", "", _GPU, "1 while a remapping is pending until the device's next reset."),
        ("gpu_remap_failed", "gauge", "", _GPU, "1 if a row could not be remapped."),
        ("gpu_pcie_replays_total", "counter", "", _GPU, "PCIe replays since the driver was loaded."),
        ("gpu_nvlink_errors_total", "counter", "", _GPU, "Errors of all NVLinks since the driver was loaded."),
        ("gpu_ecc_corrected_total", "counter", "", _GPU, "Corrected memory errors since the driver was loaded."),
        ("gpu_ecc_uncorrected_total", "counter", "", _GPU, "Uncorrected memory errors since the driver was loaded."),
    ),
    *_group(
        "Host",
        ("host_cpu_utilization_ratio", "gauge", "ratio", (), "Busy share of the host's CPUs."),
        ("host_load", "gauge", "", (), "Runnable processes, one-minute average."),
        ("host_memory_used_bytes", "gauge", "bytes", (), "Memory in use on the host."),
        ("host_memory_total_bytes", "gauge", "bytes", (), "Memory of the host."),
        ("host_swapped_pages_total", "counter", "", (), "Pages swapped in or out since the host was booted."),
        ("host_network_errors_total", "counter", "", (), "Errors and drops on all interfaces since they came up."),
        ("host_tcp_segments_total", "counter", "", (), "TCP segments sent since the host was booted."),
        ("host_tcp_retransmits_total", "counter", "", (), "TCP retransmits since the host was booted."),
        ("host_cpu_pressure_ratio", "gauge", "ratio", (),
         "Share of the last 10 s in which some process waited for a CPU core."),
        ("host_memory_pressure_ratio", "gauge", "ratio", (),
         "Share of the last 10 s in which some process waited for memory."),
        ("host_io_pressure_ratio", "gauge", "ratio", (),
         "Share of the last 10 s in which some process waited for a disk."),
        ("host_disk_read_latency_seconds", "gauge", "seconds", (), "Mean time of a read from the slowest disk."),
        ("host_disk_write_latency_seconds", "gauge", "seconds", (), "Mean time of a write to the slowest disk."),
        ("host_cgroup_throttled_seconds_total", "counter", "seconds", (), "Throttling by the cgroup's CPU limit."),
        ("host_infiniband_errors_total", "counter", "", (), "Errors on all InfiniBand and RoCE ports."),
        ("host_infiniband_downs_total", "counter", "", (), "InfiniBand and RoCE links that went down or recovered."),
        ("host_infiniband_congestion_total", "counter", "", (), "InfiniBand and RoCE congestion notifications."),
        ("disk_free_bytes", "gauge", "bytes", (), "Free space on the run's file system."),
    ),
    *_group(
        "Telemetry",
        ("telemetry_last_tick_timestamp_seconds", "gauge", "seconds", (), "When watch last ingested records."),
        ("telemetry_tick_seconds", "gauge", "seconds", (), "Duration of watch's last tick."),
        ("telemetry_rows_total", "counter", "", (), "Rows that this watch has ingested into the store."),
        ("telemetry_failed_ticks_total", "counter", "", (), "Ticks that failed; the tapes keep the records."),
        ("telemetry_analyzer_errors_total", "counter", "", ("analyzer",), "Failed runs of a live analyzer."),
    ),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def document() -> str:
    """The catalogue as Markdown: `docs/metrics.md`."""
    example = METRICS["rankscope_rank_step_duration_seconds"]
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m watch.exporting.metrics.catalogue > docs/metrics.md`.",
        "Metrics without a kind are gauges. Every metric also has the labels `run_id` and `node` (the node's index).",
        "The value of an info metric is always 1.",
        "OpenTelemetry's names have dots, but neither `_total` nor a unit:",
        f"`{example.name}` is `{example.otel_name}` ({example.otel_unit}).",
        "[alerting.md](alerting.md#prometheus) explains how to scrape them; `grafana/` has rules and dashboards.",
    ]
    group = ""
    for metric in _ALL:
        if metric.group != group:
            group = metric.group
            lines += ["", f"## {group}", ""]
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"- `{metric.name}{labels}`{'' if metric.kind == 'gauge' else f' ({metric.kind})'}: {metric.help}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
