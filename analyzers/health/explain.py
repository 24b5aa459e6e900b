"""Evidence and next step of findings on GPUs and hosts, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding, evidence_of
from analyzers.health.policy import HealthPolicy
from analyzers.wording import is_number, number, percent, sentence, size_text

__all__ = ["NEXT", "WHY"]

_ECC = ("uncorrected", "corrected", "remapped_rows")
_LINKS = (
    ("nvlink_errors", "errors on NVLinks"), ("pcie_replays", "packets resent over PCIe"),
    ("infiniband_downs", "links lost or recovered"), ("infiniband_errors", "errors of ports"),
    ("tcp_retransmits", "TCP retransmits"), ("tcp_segments", "segments in all"),
)  # fmt: skip


def _why_xid(finding: Finding) -> str:
    facts = finding.evidence
    lines = str(facts.get("message") or "").strip().splitlines()
    times = "once" if facts.get("count") == 1 else f"{facts.get('count', '?')} times"
    message = f": {lines[0][:120].replace(';', ',').rstrip('.')}" if lines else ""
    host = facts.get("node") or "its host"
    return sentence(f"the driver of {host} reported it {times}, class {finding.cause}{message}")


def _why_memory_errors(finding: Finding) -> str:
    facts = finding.evidence
    if finding.status == "suspect":
        return f"The device's counter stood at {facts.get('uncorrected')}: the errors may be older than the job."
    counts = ", ".join(f"{name.replace('_', ' ')} {facts[name]}" for name in _ECC if facts.get(name))
    return f"Increase of the device's counters during the run: {counts or 'none, but its row-remap flag is set'}."


def _why_throttled(finding: Finding) -> str:
    facts = evidence_of(finding)
    clock, hottest = facts.get("clock_median_hertz"), facts.get("hottest_celsius")
    at = f", median clock {number(clock / 1e6, 4)} MHz" if clock is not None and is_number(clock) else ""
    heat = f", at most {number(hottest)} degrees" if is_number(hottest) else ""
    share, readings = percent(facts.get("throttled_ratio")), facts.get("readings", "?")
    return f"The reason was active in {share} of {readings} readings under load{heat}{at}."


def _why_links(finding: Finding) -> str:
    facts = finding.evidence
    counts = [f"{facts[name]:,} {words}" for name, words in _LINKS if is_number(facts.get(name))]
    whose = "host" if facts.get("device") == "host" else "device"
    return f"Increase of the {whose}'s counters during the run: {', '.join(counts)}."


def _why_pressure(finding: Finding) -> str:
    facts = evidence_of(finding)
    if finding.cause == "disk":
        least = size_text(facts.get("disk_free_lowest_bytes"))
        return f"{size_text(facts.get('disk_free_bytes'))} are free now, and {least} at the lowest."
    if finding.cause == "cpu_limit":
        return f"That is {percent(facts.get('throttled_ratio'))} of the time, as the cgroup counts it (throttled_usec)."
    if finding.cause == "disk_latency":
        slow = f"{facts.get('request') or 'request'}s from {number(1e3 * HealthPolicy().disk_latency_s)} ms on"
        median_s = facts.get("latency_median_s")
        took = "no median"
        if median_s is not None and is_number(median_s):
            took = f"a median of {number(1e3 * median_s)} ms"
        return f"{percent(facts.get('slow_ratio'))} of the readings had {slow}, with {took}."
    if finding.cause == "memory":
        share = percent(facts.get("memory_pressure_ratio"))
        return f"Pressure stall information: {share} on average over the readings."
    return (
        f"In {percent(facts.get('waiting_ratio'))} of the readings too many processes were runnable for "
        f"{facts.get('num_cpus', '?')} CPUs, {number(facts.get('load_median'))} at the median."
    )


def _why(of_readings: Callable[[Finding], str]) -> Callable[[Finding], str]:
    """Quote the log line that shows the problem; without one, state what was measured."""
    return lambda finding: (
        sentence(f"{finding.evidence['basis']}".rstrip(". ").replace(";", ","))
        if "basis" in finding.evidence
        else of_readings(finding)
    )


def _by_cause(texts: Mapping[str, str], general: str) -> Callable[[Finding], str]:
    return lambda finding: texts.get(finding.cause, general)


WHY: Mapping[str, Callable[[Finding], str]] = {
    "xid": _why(_why_xid),
    "gpu_memory_errors": _why_memory_errors,
    "gpu_throttled": _why(_why_throttled),
    "link_errors": _why(_why_links),
    "host_pressure": _why(_why_pressure),
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "xid": lambda finding: sentence(str(finding.evidence.get("action") or "see the runbook")),
    "gpu_memory_errors": _by_cause(
        {
            "corrected": "Watch whether the rate rises, and reset the device at the next opportunity.",
            "remap_failed": "Take the device out of the next run and have it replaced.",
            "remapped": "Reset the device at the next opportunity, so that the spare rows take effect.",
            "uncorrected": "Do not trust what this device computed: take it out of the next run, reset and test it.",
        },
        "Take the device out of the next run, reset and test it.",
    ),
    "gpu_throttled": _by_cause(
        {
            "hardware": "Check the power supply and the cooling of the device.",
            "power": "Check the power supply of the host: its power brake was active.",
            "thermal": "Check fans, air flow and inlet temperature of the host.",
        },
        "Check the cooling and the power of the device.",
    ),
    "link_errors": _by_cause(
        {
            "infiniband": "Run ibqueryerrors and ethtool -S on that host, and check its cables and transceivers.",
            "infiniband_down": "Check cable, transceiver and switch port (dmesg, ibdiagnet), or exclude the host.",
            "tcp": "Check the host's interface, cable and switch port (ethtool -S), and whether the network is full.",
            "nvlink": "Run nvidia-smi nvlink -s and -e, check bridges and seating, then reset the device.",
            "pcie": "Check lspci -vv and dmesg for that device, reseat it, or try another slot or riser.",
        },
        "Check the device's links: cables, bridges, seating.",
    ),
    "host_pressure": _by_cause(
        {
            "blocked": "Find what it waits for: its stack below that line, its mounts and disks (nfsstat, iostat -x).",
            "heat": "Check fans, air flow and inlet temperature of the host.",
            "cpu_limit": "Raise or remove the CPU limit of the container, or use fewer threads and loader workers.",
            "memory": "Use fewer loader workers, smaller buffers or a host with more memory.",
            "disk_latency": "Check what else writes there (iostat -x), and move data or checkpoints to a faster disk.",
            "disk": "Free space on that disk, keep fewer checkpoints, or write the run elsewhere.",
            "run_queue": "Use fewer ranks, loader workers or threads (OMP_NUM_THREADS), or move other jobs elsewhere.",
        },
        "Free resources of the host, or move load off it.",
    ),
    "health": lambda finding: "Check that `watch` runs on every node and can read its devices.",
}
