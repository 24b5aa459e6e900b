"""Thresholds of communication: its cost, and slow links.

Source of all numbers unless a field names another: measured on drills, healthy runs and the simulator
(`benchmarks.diagnosis`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CommunicationPolicy", "LinkHistoryPolicy", "NetworkLinkPolicy", "SlowLinkPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPolicy:
    """When the cost of communication is worth advice."""

    warm_up_steps: int = 5
    """First steps, in which connections are made and buckets are built anew."""
    min_steps: int = 10
    """Steps needed to measure a share."""
    exposed_ratio: float = 0.1
    """Share of the step that exposed transfers may take, also in profiler traces. Source: convention; a training that
    is set up well hides the rest."""
    exposed_alert_ratio: float = 0.2
    """The same share from which an alert is a warning; below it is information. Source: convention."""
    max_trace_gap_ratio: float = 0.1
    """Share of the step by which stamps of the compute stream and torch's profiler may differ in what is exposed.
    Source: runs recorded on an H200; at most 0.061 where both are right, 0.17 to 0.25 with two hardware queues."""
    large_bytes: int = 1 << 20
    """Messages of this size and more are limited by the link, not by the latency of a call."""
    slow_factor: float = 3.0
    """Best bandwidth seen / that of a dimension's large messages. Within and between nodes they differ by 5 to 10."""
    latency_ratio: float = 0.5
    """Share of a bucket's transfer that is latency from which the bucket counts as small."""
    min_bucket_bytes: int = 1024
    """Smaller messages are norms, losses and votes, not buckets."""
    min_buckets: int = 4
    """Calls per step: fewer need not be joined."""
    min_gain_ratio: float = 0.05
    """Least share of the step that larger buckets would save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHistoryPolicy:
    """When transfers became slower than they were, where no other group or pair can be compared with."""

    min_factor: float = 2.0
    """Transfers since the onset / before it: no other group confirms it."""
    min_windows: int = 3
    """Slow windows. The newest may hold a single step, and a burst of six steps at the end of a run is no slow link."""
    min_windows_before: int = 3
    """Windows before the onset."""
    min_s: float = 5.0
    """How long transfers must have been slow (s): another job, or `watch` as it judges, slows transfers through shared
    cores for a time, whatever the steps are long. On clean loops of 30 ms a step it was 0.7 to 2.2 s."""
    min_sigmas: float = 6.0
    """Change of the logarithm / its noise from window to window."""
    precedent_factor: float = 1.3
    """Median since the onset / slowest window before it."""
    agreement_ratio: float = 0.8
    """Share of windows since the onset that are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkPolicy:
    """When a link is slow. "Beside it": groups of the same dimension, operation and size, or pairs of the same size."""

    window_steps: int = 5
    """Steps whose median transfer is compared."""
    min_factor: float = 1.5
    """Transfer / median transfer of at least two groups beside it. Ring collectives vary by 10 to 20 %."""
    min_factor_pair: float = 2.0
    """The same with a single group beside it."""
    min_excess_ms: float = 0.5
    """Smallest excess per step (ms)."""
    min_step_share_ratio: float = 0.05
    """Smallest excess as a share of the step: ranks that share cores are late for each other by a few percent."""
    clear_factor: float = 3.0
    """Transfer / that of those beside it that no lateness explains: reported although it costs little yet."""
    min_clear_share_ratio: float = 0.005
    """Smallest excess as a share of the step where the factor is clear."""
    min_windows: int = 2
    """Slow windows in a row: ten steps to detection."""
    min_windows_pair: int = 4
    """The same with a single group beside it: only time shows which of the two is the unusual one."""
    min_windows_ended: int = 6
    """Slow windows of a slowdown that is over: a burst of another job on a shared machine is shorter."""
    min_windows_crowded: int = 4
    """Slow windows where ranks wait for cores so long that this alone may slow transfers. The factor must be clear."""
    host_share_ratio: float = 0.5
    """Waiting for cores / excess from which the host explains the excess."""
    min_excess_crowded_ratio: float = 0.5
    """Excess / waiting for cores from which a clear factor is not explained by the host. Small messages take several
    times as long where the receiver waits for a core."""
    explained_share_ratio: float = 0.5
    """Share of a slow link's steps in which one of its ranks is slow from which the rank explains the link."""
    agreement_ratio: float = 0.8
    """Share of slow windows from the onset to the end."""
    crossing_factor: float = 1.3
    """Transfer / that of those beside it of a group that shares one member with a slow group. It only has to tell
    which member is slow, no longer whether one is."""
    min_windows_crossing: int = 3
    """Newest windows of such a group that are compared, or the newer half: the onset is uncertain by some."""
    history: LinkHistoryPolicy = field(default_factory=LinkHistoryPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLinkPolicy:
    """When one link between nodes is slow. Source: played NCCL (`benchmarks.played`); no real network yet."""

    min_factor: float = 2.0
    """Time for which a sender waits for its network per byte / the median of all other links."""
    min_bytes: int = 16 << 20
    """Bytes that a link must have moved to be compared: less is latency."""
