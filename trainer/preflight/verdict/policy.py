"""Every threshold of a preflight's verdict, with unit and source."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PreflightPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPolicy:
    """Limits beyond which a reading differs too much from its peers."""

    slow_device_ratio: float = 0.9
    """A device is reported if its speed over the median of its peers or its past is below this (ratio). Source: healthy
    GPUs of one model differ by some 5 % in sustained clock."""
    failed_device_ratio: float = 0.75
    """Speed below which a device fails the check (ratio). Source: every step of a synchronous job would take a third
    longer."""
    slow_link_ratio: float = 0.7
    """Bandwidth of a link over the median of all below which it is reported (ratio). Source: links of one fabric differ
    by up to 20 % with their distance in it."""
    half_speed_ratio: float = 0.5
    """A link fails the check if its bandwidth over the median of all is below this, and any reading below this share of
    the lower quartile is reported, whatever the spread. Source: half of the lanes or one of two rails is gone.
    Measured: on a shared host the clocks of processors change by a quarter for seconds, which hid a processor at a
    third of its speed."""
    least_latency_s: float = 100e-6
    """Smallest excess of a latency over the median that is reported (seconds). Source: interrupts and scheduling of a
    host take this long."""
    least_z: float = 5.0
    """Smallest distance of a slow reading from the median, in robust standard deviations. Source: among 4,096 normally
    distributed readings, one is that far below the median in one of 850 checks."""
    least_peers: int = 4
    """Minimum number of readings for a median and spread; with fewer, each is compared with the fastest. Source: the
    median absolute deviation of three values is the distance of the middle one to its nearer neighbour."""
    few_peers_ratio: float = 0.6
    """Speed / fastest speed below which a reading fails if there are few peers (ratio). Source: convention."""
    warned_clock_s: float = 0.1
    """Smallest distance of a clock from the median that is reported (seconds). Source: NTP holds 10 ms, and logs of
    several nodes are ordered by it."""
    failed_clock_s: float = 1.0
    """Smallest distance of a clock that fails the check (seconds). Source: leases and certificates fail, and a timeline
    over nodes is useless."""
    least_disk_bytes: int = 10 << 30
    """Free disk below which a node is reported (bytes). Source: `rankscope doctor`."""
    least_shared_bytes: int = 1 << 30
    """Free shared memory below which a node is reported (bytes). Source: `rankscope doctor`; Docker gives 64 MiB."""
    must_match: tuple[str, ...] = ("python", "torch", "nccl", "cuda", "hip", "rankscope", "device model", "devices")
    """Facts that fail the check if they differ; others are reported. Source: a job over different builds of these hangs
    or computes different numbers."""
