"""The health of GPUs and hosts: XID errors, memory errors, throttling, links, disk and run queue.

    device_health(store, Scope())       # kinds xid, gpu_memory_errors, gpu_throttled, link_errors, host_pressure

The input is table `health` (one reading of each device and host a second, NULL if a value is not supported) and the
events `xid`. `watch` writes both. The meanings of the XID codes are in `xids.toml`.

* Counters start when the driver is loaded, so only their increase during the run counts.
* A device is throttled if a reason that costs speed (heat, power brake, hardware slow-down) is active in at least
  `cost_ratio` of its readings under load. If there are only a few readings and it is active in all of them, the finding
  is only suspected. The ordinary power cap does not count: under full load it is always active.
* Ranks are found through the devices' UUIDs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from analyzers.analysis import Analysis
from analyzers.finding import Finding, Severity
from analyzers.health.counters import disk_latency_findings, health_warning, host_counter_findings, rise
from analyzers.health.policy import HealthPolicy
from analyzers.health.xids import xid_findings
from analyzers.policy import SHARED
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Source, lacking

__all__ = ["ANALYSES", "NUM_CHECKS", "THROTTLE_BITS", "device_health", "unread_of_devices"]

THROTTLE_BITS = {
    0x08: ("hardware", "a hardware slowdown"),
    0x20: ("thermal", "heat (driver)"),
    0x40: ("thermal", "heat (hardware)"),
    0x80: ("power", "the power brake"),
}
"""NVML's clock event reasons that cost speed and are not intended: bit -> (cause, text). Idle (1), application clocks
(2), the power cap (4), sync boost (16) and display clocks (256) are settings or ordinary."""
_READINGS = {
    "temperature": ("temperature_celsius",),
    "throttling": ("throttle_reasons",),
    "ECC": ("ecc_corrected_total", "ecc_uncorrected_total"),
    "remapped rows": ("remapped_rows_total",),
    "PCIe replays": ("pcie_replay_total",),
    "NVLink errors": ("nvlink_errors_total",),
}
"""Checks of a GPU, and the columns that they need; no verdict follows from a temperature alone."""
NUM_CHECKS = len(_READINGS)
_HOST_READINGS = {
    "load_1m": "load",
    "num_cpus": "number of CPUs",
    "disk_free_bytes": "free disk",
    "memory_used_bytes": "memory in use",
    "memory_total_bytes": "size of the memory",
}
"""Text for each column of the host's readings."""


def device_health(source: Source, scope: Scope, policy: HealthPolicy | None = None) -> list[Finding]:
    """Findings over the whole run, and the readings that are missing."""
    policy = policy or HealthPolicy()
    ranks = _ranks_of_devices(source)
    found = xid_findings(source, ranks)
    if absent := lacking(source, health=("device", "sample_ns")):
        return [
            *found,
            _insufficient(f"GPU and host health was not checked: {not_recorded(absent)}.", evidence=missing(absent)),
        ]
    found += _memory_errors(source, ranks, policy)
    found += _throttled(source, ranks)
    found += _links(source, ranks, policy)
    found += _hosts(source, policy)
    found += host_counter_findings(source, policy)
    found += disk_latency_findings(source, policy)
    return [*found, *_not_read(source)]


# ---- GPUs ----


def _memory_errors(source: Source, ranks: Mapping[str, tuple[int, ...]], policy: HealthPolicy) -> list[Finding]:
    findings = []
    for node, device, uncorrected, corrected, remapped, pending, failed in source.rows(
        f"""
        SELECT node, device, {rise("ecc_uncorrected_total")}, {rise("ecc_corrected_total")},
               {rise("remapped_rows_total")}, bool_or(remap_pending), bool_or(remap_failed)
        FROM health WHERE device <> 'host' GROUP BY node, device ORDER BY node, device
        """
    ):
        cause, what = "", ""
        severity: Severity = "warning"
        if failed:
            cause, severity, what = "remap_failed", "critical", "a row of its memory could not be remapped"
        elif uncorrected:
            cause, severity = "uncorrected", "critical"
            what = _count(uncorrected, "uncorrectable ECC error")
        elif pending or remapped:
            cause = "remapped"
            rows = _count(remapped, "row") if remapped else "rows"
            what = f"{rows} of its memory remapped" + (", in effect after a reset" if pending else "")
        elif (corrected or 0) >= policy.many_errors:
            cause, what = "corrected", f"{corrected:,} corrected ECC errors during this run"
        if cause:
            numbers = {"uncorrected": uncorrected, "corrected": corrected, "remapped_rows": remapped}
            numbers |= {"remap_pending": pending, "remap_failed": failed}
            findings.append(_device("gpu_memory_errors", cause, severity, (node, device), ranks, what, numbers))
    return findings


def _throttled(source: Source, ranks: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    bits = list(THROTTLE_BITS)
    counts = ", ".join(f"count(*) FILTER (throttle_reasons & {bit} <> 0)" for bit in bits)
    findings = []
    for node, device, readings, hottest, clock, *hits in source.rows(
        f"""
        SELECT node, device, count(*), max(temperature_celsius), median(sm_clock_hertz), {counts} FROM health
        WHERE device <> 'host' AND throttle_reasons IS NOT NULL AND coalesce(gpu_utilization_ratio, 1.0) >= ?
        GROUP BY node, device ORDER BY node, device
        """,
        [SHARED.loaded_ratio],
    ):
        share, bit = max((hit / readings, bit) for hit, bit in zip(hits, bits, strict=True))
        are_few = readings < SHARED.min_steps  # a single reading, as from `nvidia-smi -q`
        if share < (1.0 if are_few else SHARED.cost_ratio):
            continue
        cause, words = THROTTLE_BITS[bit]
        what = f"slowed by {words} in {100 * share:.0f} % of its readings under load"
        if are_few:
            what = f"slowed by {words} in " + (
                f"all of its {readings} readings" if readings > 1 else "its only reading"
            )
        what += "" if hottest is None else f", up to {hottest:.0f} degrees"
        numbers = {"throttled_ratio": round(share, 4), "hottest_celsius": hottest, "clock_median_hertz": clock}
        numbers |= {"readings": readings, "reason_bit": bit}
        found = _device("gpu_throttled", cause, "warning", (node, device), ranks, what, numbers)
        findings.append(replace(found, status="suspect") if are_few else found)
    return findings


def _links(source: Source, ranks: Mapping[str, tuple[int, ...]], policy: HealthPolicy) -> list[Finding]:
    findings = []
    for node, device, replays, nvlink in source.rows(
        f"""
        SELECT node, device, {rise("pcie_replay_total")}, {rise("nvlink_errors_total")} FROM health
        WHERE device <> 'host' GROUP BY node, device ORDER BY node, device
        """
    ):
        numbers = {"pcie_replays": replays, "nvlink_errors": nvlink}
        if (nvlink or 0) >= 1:
            what = f"{_count(nvlink, 'error')} on its NVLinks during this run"
            findings.append(_device("link_errors", "nvlink", "warning", (node, device), ranks, what, numbers))
        elif (replays or 0) >= policy.many_errors:
            what = f"{replays:,} packets resent over PCIe during this run"
            findings.append(_device("link_errors", "pcie", "warning", (node, device), ranks, what, numbers))
    return findings


def _device(
    kind: str,
    cause: str,
    severity: Severity,
    place: tuple[str, str],
    ranks: Mapping[str, tuple[int, ...]],
    what: str,
    numbers: Mapping[str, Any],
) -> Finding:
    node, device = place
    who = ranks.get(device, ())
    of_rank = f" (rank {', '.join(map(str, who))})" if who else ""
    return Finding(
        analyzer="health",
        kind=kind,
        severity=severity,
        status="fired",
        ranks=who,
        cause=cause,
        summary=f"{device} of {node}{of_rank}: {what}.",
        evidence={"node": node, "device": device, **numbers},
        advice=f"{kind.replace('_', '-')}-{cause}",
    )


# ---- hosts ----


def _hosts(source: Source, policy: HealthPolicy) -> list[Finding]:
    findings = []
    for node, least, newest, rate, steadiness, over_s, readings, waiting, load, cpus in source.rows(
        """
        SELECT node, min(disk_free_bytes), arg_max(disk_free_bytes, sample_ns),
               regr_slope(disk_free_bytes, sample_ns / 1e9) FILTER (
                   sample_ns >= (SELECT max(sample_ns) FROM health) - 600000000000),
               regr_r2(disk_free_bytes, sample_ns / 1e9) FILTER (
                   sample_ns >= (SELECT max(sample_ns) FROM health) - 600000000000),
               least(600, (max(sample_ns) - min(sample_ns)) / 1e9), count(disk_free_bytes),
               avg(CASE WHEN load_1m > ? * num_cpus THEN 1.0 WHEN load_1m IS NOT NULL THEN 0.0 END),
               median(load_1m), max(num_cpus)
        FROM health WHERE device = 'host' GROUP BY node ORDER BY node
        """,
        [SHARED.doubled_factor],  # load / CPUs: every core has a second process ready to run
    ):
        is_trend = rate is not None and rate < 0 and readings >= SHARED.history
        is_steady = is_trend and (steadiness or 0.0) >= SHARED.nearly_all_ratio  # a single drop results in at most 0.75
        soon_s = newest / -rate if newest is not None and is_steady else None
        is_soon = soon_s is not None and soon_s < min(policy.disk_soon_s, policy.disk_reach_factor * over_s)
        is_low = newest is not None and newest < policy.disk_free_bytes
        if is_low or is_soon:
            until = f"full in {soon_s / 60:.0f} min at the current rate" if soon_s is not None and is_soon else ""
            risk = "a checkpoint may not fit" if is_low else ""
            findings.append(
                health_warning(
                    "host_pressure",
                    "disk",
                    f"Host {node} has {newest / 2**30:.1f} GiB free for the run"
                    f"{f', {until}' if until else ''}{f': {risk}' if risk else ''}.",
                    {"node": node, "disk_free_bytes": newest, "disk_free_lowest_bytes": least,
                     "time_until_full_s": None if soon_s is None else round(soon_s, 1)},
                )
            )  # fmt: skip
        if cpus and (waiting or 0.0) >= SHARED.explained_ratio:
            findings.append(
                Finding.advise(
                    "health",
                    "host_pressure",
                    f"Host {node} has {load:.1f} runnable processes on {cpus} CPUs (median), so ranks wait for a core.",
                    cause="run_queue",
                    evidence={"node": node, "load_median": round(load, 2), "num_cpus": cpus,
                              "waiting_ratio": round(waiting, 4)},
                    advice="host-pressure-run_queue",
                )
            )  # fmt: skip
    return findings


def _not_read(source: Source) -> list[Finding]:
    """Report missing readings, because a column of NULLs does not mean that all is well."""
    findings = []
    ((devices, hosts),) = source.rows(
        "SELECT count(DISTINCT device) FILTER (device <> 'host'), count(*) FILTER (device = 'host') FROM health"
    )
    ((on_gpu,),) = (
        [(0,)]
        if lacking(source, ranks=("device",))
        else source.rows("SELECT count(*) FROM ranks WHERE starts_with(device, 'cuda')")
    )
    if on_gpu and not devices:
        findings.append(_insufficient("The health of GPUs was not checked: only hosts have readings."))
    if devices and (absent := unread_of_devices(source)):
        findings.append(_insufficient(f"The GPUs' {', '.join(absent)} are unknown: not read or not supported."))
    if not hosts:
        findings.append(_insufficient("The health of hosts was not checked: only GPUs have readings."))
    else:
        there = ", ".join(f"bool_or({column} IS NOT NULL)" for column in _HOST_READINGS)
        (found,) = source.rows(f"SELECT {there} FROM health WHERE device = 'host'")
        absent = [name for name, is_there in zip(_HOST_READINGS.values(), found, strict=True) if not is_there]
        if absent:
            findings.append(_insufficient(f"These readings of the hosts are unknown: {', '.join(absent)}."))
    return findings


def unread_of_devices(source: Source) -> list[str]:
    """GPU checks for which no device has readings."""
    columns = [column for needed in _READINGS.values() for column in needed]
    there = ", ".join(f"bool_or({column} IS NOT NULL)" for column in columns)
    (found,) = source.rows(f"SELECT {there} FROM health WHERE device <> 'host'")
    has = dict(zip(columns, found, strict=True))
    return [name for name, needed in _READINGS.items() if not all(has[column] for column in needed)]


def _ranks_of_devices(source: Source) -> dict[str, tuple[int, ...]]:
    """{UUID: ranks} in the newest attempt that used the device; ranks are renumbered if another device is excluded."""
    if lacking(source, ranks=("device_uuid",)):
        return {}
    rows = source.rows(
        "SELECT device_uuid, list(DISTINCT rank ORDER BY rank) FROM (SELECT * FROM ranks WHERE device_uuid <> '' "
        "AND rank >= 0 QUALIFY attempt = max(attempt) OVER (PARTITION BY device_uuid)) GROUP BY device_uuid"
    )
    return {str(uuid): tuple(int(rank) for rank in who) for uuid, who in rows}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


_insufficient = partial(Finding.insufficient, "health", "health")


ANALYSES = (
    Analysis(
        kinds=("health", "xid", "gpu_memory_errors", "gpu_throttled", "link_errors", "host_pressure"),
        run=device_health,
        live="periodic",
    ),
)
