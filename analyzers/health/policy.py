"""Thresholds of the health of GPUs and hosts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HealthPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a reading or counter is reported."""

    many_errors: int = 100
    """Number of corrected memory errors, PCIe replays, or InfiniBand or RoCE errors of a device or port during the run
    (count) at which they are reported. Source: convention; a few an hour are ordinary, a marginal cable has thousands.
    """
    tcp_retransmits: int = 1000
    """Retransmitted TCP segments during the run at which they are reported (count). Source: convention; a few closed
    connections are not a fault."""
    program_fault_s: float = 30.0
    """Time (seconds) around a program's XID within which its process ends. Source: convention; the driver reports it
    immediately, and the process at its next synchronisation with the device.
    """
    disk_free_bytes: int = 5 << 30
    """Free space (bytes) below which the next checkpoint may not fit. Source: convention."""
    disk_soon_s: float = 3600.0
    """A disk is reported if, at the present rate, it is full within this time (seconds). Source: convention; time to
    act."""
    disk_reach_factor: float = 10.0
    """Longest extrapolation of a rate / time over which it was measured (ratio). Source: convention; a minute of
    another program's writes says little about the next hour."""
    disk_latency_s: float = 0.1
    """Time of a read or write (seconds) at which a disk is slow. Source: convention; solid-state disks take below 0.001
    s, spinning ones 0.01 s, and several times that under load."""
