"""Thresholds of communication: its cost, and slow links.

Source of all numbers unless a field names another: measured on drills, healthy runs and the simulator
(`benchmarks.accuracy.diagnosis`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CommunicationPolicy", "NetworkLinkPolicy", "SlowLinkPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPolicy:
    """When the cost of communication is worth advice."""

    large_bytes: int = 1 << 20
    """Messages of this size and more are limited by the link, not by the latency of a call."""
    min_buckets: int = 4
    """Calls per step: fewer need not be joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkPolicy:
    """When a link is slow, compared with groups of one dimension, operation and size, or pairs of the same size."""

    min_excess_ms: float = 0.5
    """Smallest excess per step (ms)."""
    crossing_factor: float = 1.3
    """Transfer / that of comparable groups, of a group that shares one member with a slow group. It only has to tell
    which member is slow, no longer whether one is."""
    min_windows_unsure: int = 4
    """The same with a single comparable group, where only time shows which of the two is the unusual one; of a slowdown
    that is over; and where ranks wait for cores so long that this alone may slow transfers."""
    min_rise_s: float = 5.0
    """How long transfers must have been slow where no other group or pair can be compared with (s): another job, or
    `watch` as it judges, slows transfers through shared cores for a time, whatever the steps are long. On clean loops
    of 30 ms per step it was 0.7 to 2.2 s. Between devices `agreement_ratio` of it is enough: only hosts share cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLinkPolicy:
    """When one link between nodes is slow. Source: played NCCL (`tests.support.played`); no real network yet."""

    min_bytes: int = 16 << 20
    """Bytes that a link must have moved to be compared: less is latency."""
