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
    """Minimum size of messages that are limited by the link, not by call latency."""
    min_buckets: int = 4
    """Minimum number of calls per step: fewer need not be joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkPolicy:
    """When a link is slow, compared with groups of one dimension, operation and size, or pairs of the same size."""

    min_excess_ms: float = 0.5
    """Smallest excess per step (ms)."""
    crossing_factor: float = 1.3
    """Transfer time / transfer time of comparable groups, for a group that shares one member with a slow group. It only
    decides which member is slow, not whether one is."""
    min_windows_unsure: int = 4
    """Minimum number of windows if there is a single comparable group, where only the past shows which of the two is
    unusual. The same minimum holds if the slowdown is over, or if ranks wait for cores so long that this alone may slow
    transfers."""
    min_rise_s: float = 5.0
    """How long transfers must have been slow if there is no other group or pair to compare with (s). Another job, or
    `watch` during its analyses, uses the same cores and slows transfers for some time, however long the steps are. On
    clean loops of 30 ms per step this lasted 0.7 to 2.2 s. Between devices `agreement_ratio` of this time is enough,
    because only hosts share cores.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLinkPolicy:
    """When one link between nodes is slow. Source: played NCCL (`tests.support.played`); no real network yet."""

    min_bytes: int = 16 << 20
    """Minimum bytes that a link must have moved to be compared; below that, latency dominates."""
