"""Thresholds that mean the same in several analyses, each defined once.

    from analyzers.policy import SHARED
    if len(steps) < SHARED.warm_up_steps + SHARED.min_steps: ...

Thresholds of a single analysis are in the policy of its package.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHARED", "SharedPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPolicy:
    """Amounts of data, shares and distances. A value without a named source was measured on the simulator, in drills
    and in healthy runs on quiet, busy and overloaded machines (`benchmarks.accuracy.diagnosis`)."""

    warm_up_steps: int = 5
    """First steps of an attempt (count) that are left out: compilation, allocators, connections, loader workers, caches
    and autotuning."""
    min_steps: int = 10
    """Minimum number of steps (count) for a median or a share."""
    block_steps: int = 5
    """Consecutive steps (count) whose median or mean is one observation: it removes single jitters, and a detection
    from two blocks takes ten steps."""
    history: int = 15
    """Minimum number of steps, windows or readings (count) that define the usual level and its spread."""
    repeats: int = 2
    """Number of occurrences (count) that count as a repetition: one may be a slow moment, bad luck or a lost record.
    Source: convention; two blocks of slow transfers are ten steps."""
    min_times: int = 3
    """Minimum number of occurrences (count) that are not chance: a median needs three values, and a few steps may be
    printed after an error. Source: convention."""
    trend_values: int = 5
    """Minimum number of values (count) that show a regular interval, a trend or their noise. Source: convention."""
    many_values: int = 8
    """Minimum number of values (count) for robust estimates of level and spread: ranks of a group, blocks, samples. For
    fewer ranks the largest deviation is used as the spread."""
    minor_ratio: float = 1 / 3
    """Share of a whole below which something is a side effect (ratio). Source: a rank short of CPU is
    somewhat slower in every phase."""
    explained_ratio: float = 0.5
    """Minimum share of a whole that explains it (ratio)."""
    agreement_ratio: float = 0.7
    """Share that counts as most of a whole (ratio). So many observations must agree, and a phase must hold so much of
    an excess to be named. If a rank is slow in all its computing, about 60 % of its excess is in backward."""
    interval_sigmas: float = 2.0
    """Deviation of a mean, in standard errors, that can still be chance. Source: convention, 95 %."""
    sure_sigmas: float = 3.0
    """Deviation of a mean, in standard errors, that is not chance: for a lasting mean excess of a rank, and for a rise
    that dates an onset. By chance a single step exceeds half of such a rise (1.5 sigmas), but rarely two in a row.
    """
    outlier_sigmas: float = 4.0
    """Distance from its peers, in standard deviations, at which a single value is an outlier. If many places are tried,
    the largest of as many normal variables gives the bound where it is higher."""
    certain_sigmas: float = 6.0
    """Size of a change, in standard deviations, that is certain without other evidence."""
    burst_sigmas: float = 9.0
    """Effect / noise below which more than the minimum number of observations is needed: proportionally more. A burst
    of another job on a busy machine is 3 to 6 times the noise and lasts 10 to 20 steps."""
    slow_factor: float = 1.5
    """Value / the usual or planned one at which it stands out (ratio): transfers of a ring vary by 10 to 20 %, and a
    plan assumes half of the devices' peak. Source: convention."""
    doubled_factor: float = 2.0
    """Value / usual value (earlier, or of other ranks) from which it is clearly larger (ratio). Source: convention."""
    clear_factor: float = 3.0
    """A value that is this many times the usual one is sufficient evidence on its own (ratio): a transfer that still
    costs little, a learning rate (warm-up grows by less per step), an expert's load, a switch's latency, the age of a
    save. Source: convention.
    """
    beyond_factor: float = 1.4
    """Minimum effect / largest effect in any other rank, group or window."""
    beyond_few_factor: float = 2.0
    """The same threshold if there are few others to compare with, or if the effect is over."""
    min_excess_ms: float = 0.3
    """Smallest excess per step (ms): smaller ones are within the resolution of the timer and the scheduler."""
    min_share_ratio: float = 0.005
    """Smallest excess as a share of a step or level (ratio): a slow part that takes almost no time costs nothing."""
    min_gain_ratio: float = 0.01
    """Smallest lost share of the time that is worth acting on (ratio). Source: convention."""
    min_change_ratio: float = 0.02
    """Smallest relative change, or share of work that can be moved, that counts (ratio): repeated runs of one
    configuration differ by 1 to 2 %. Source: convention."""
    saving_ratio: float = 0.05
    """Smallest share of time or size at which growth, or a cost that a setting could avoid, matters (ratio). Ranks that
    share cores delay each other by a few percent. Source: convention."""
    smallest_memory_bytes: int = 2 << 30
    """Smallest planned peak judged, and what a device's use beyond twice its rank's peak must exceed to show another
    process (bytes). Source:
    on an H100, plans of 14 and 38 GiB were 3 % and 1 % too high, those of 0.6 to 1.4 GiB up to 14 % off; on an H200 a
    rank used up to 1.3 GB beyond its peak (context, kernels, NCCL's buffers), an idle device 0.7."""
    window_samples: int = 20
    """Newest samples of gradients or experts (count) that are judged. Source: convention."""
    slow_change_steps: int = 200
    """Newest steps (count) in which a slow change is looked for: an allocator fills in the first hundred, the noise
    scale grows tenfold in them. Source: measured."""
    cost_ratio: float = 0.1
    """Smallest share of the time at which a cost, or unmeasured time, matters (ratio). Source: convention; for a job's
    slowdown Lin et al. (OSDI 2025)."""
    large_share_ratio: float = 0.2
    """Share of a whole that counts as large (ratio), for example of the time for a warning. Source: convention; a cache
    rarely exceeds five times the memory that was ever in use.
    """
    severe_share_ratio: float = 0.3
    """Share of a whole that no healthy job reaches (ratio): bubbles beyond the schedule's, waiting for one rank,
    padding (batches of random lengths have 10 to 25 %). Source: convention."""
    nearly_all_ratio: float = 0.95
    """Share of a whole that counts as all of it (ratio). Source: convention."""
    loaded_ratio: float = 0.2
    """GPU utilisation (ratio) at which a reading counts as under load. Source: convention."""
    equal_ratio: float = 0.1
    """Largest difference at which two distances, sizes or measurements count as equal (ratio). Source: convention;
    stamps and traces of an H200 differ by at most 0.061 where both are right, and by 0.17 to 0.25 with two hardware
    queues."""
    same_ratio: float = 0.01
    """Largest difference between two numbers that rounding explains (ratio). Source: logged values have three digits,
    and batches are rounded to ranks."""
    min_payload_bytes: int = 1024
    """Smallest payload of a collective (bytes) that counts as traffic: loss, norms and votes are smaller."""
    queued_ns: int = 50_000
    """Largest gap (ns) after which a kernel counts as queued behind the previous one of its group. Source: launching
    takes longer."""


SHARED = SharedPolicy()
