"""Thresholds of the health of GPUs and hosts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HealthPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a reading or counter is reported."""

    throttled_ratio: float = 0.1
    """Share of readings under load in which a device was slowed down. Source: convention."""
    min_readings: int = 10
    """Readings of a device, or of a host whose processes are stopped or wait for memory, for that (count). Source:
    convention; ten seconds at one reading a second."""
    loaded_ratio: float = 0.2
    """GPU utilisation (ratio) from which a reading is one under load. Source: convention."""
    corrected_errors: int = 100
    """Corrected memory errors during the run (count). Source: convention; NVIDIA's XID 92 is a high rate of them."""
    pcie_replays: int = 50
    """Replays during the run (count). Source: convention; a few an hour are ordinary, a bad link adds some a second."""
    nvlink_errors: int = 1
    """Errors of NVLinks during the run (count). Source: convention; a sound link has none."""
    infiniband_downs: int = 1
    """Links of InfiniBand or RoCE ports lost or recovered during the run (count). Source: a sound link keeps its state
    for months."""
    infiniband_errors: int = 100
    """Errors of such ports during the run (count). Source: convention; a marginal cable has thousands an hour."""
    tcp_retransmit_ratio: float = 0.01
    """Share of TCP segments that were sent again (ratio). Source: within a data centre it is below a thousandth."""
    tcp_retransmits: int = 1000
    """Segments sent again for that (count). Source: convention; a few connections that ended are no network."""
    program_fault_s: float = 30.0
    """Time (seconds) around an XID of a program in which its process ends. Source: convention; the driver reports it at
    once, and the process at its next synchronisation with the device."""
    throttled_cgroup_ratio: float = 0.05
    """Seconds that a CPU limit stopped processes, a second of the run (ratio). Source: convention; a limit that is
    never reached has none."""
    memory_pressure_ratio: float = 0.1
    """Share of time in which some process waited for memory (ratio). Source: convention; PSI of a sound host is 0."""
    disk_free_bytes: int = 5 << 30
    """Free space (bytes) below which the next checkpoint may not fit. Source: convention."""
    disk_soon_s: float = 3600.0
    """Time (seconds) until the disk is full at the present rate. Source: convention; time to act."""
    disk_rate_over_s: float = 120.0
    """Seconds of readings before a rate counts. Source: convention; one checkpoint being written is no trend."""
    queue_factor: float = 2.0
    """Runnable processes over CPUs (ratio), from which ranks wait for a core. Source: convention."""
    queue_ratio: float = 0.5
    """Share of readings above `queue_factor`. Source: convention."""
    disk_latency_s: float = 0.1
    """Time of a read or write (seconds), from which a disk is slow. Source: convention; solid-state disks take below
    0.001 s, spinning ones 0.01 s, and several times that under load."""
    disk_latency_ratio: float = 0.5
    """Share of readings with a request that slow. Source: convention; a checkpoint being written is shorter."""
