"""Thresholds that mean the same in several analyses, each defined once.

    from analyzers.policy import SHARED
    if len(steps) < SHARED.warm_up_steps + SHARED.min_steps: ...

What only one analysis knows is in the policy of its package.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHARED", "SharedPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPolicy:
    """Amounts of data, shares and distances. Source unless a field names another: measured on the simulator, drills and
    healthy runs on quiet, busy and crowded machines (`benchmarks.accuracy.diagnosis`)."""

    warm_up_steps: int = 5
    """First steps of an attempt (count) that are left out: compilation, allocators, connections, loader workers, caches
    and autotuning."""
    min_steps: int = 10
    """Steps (count) from which a median or a share of them is known."""
    block_steps: int = 5
    """Neighbouring steps (count) whose median or mean is one observation: single jitters vanish, and two blocks are ten
    steps to detection."""
    history: int = 15
    """Steps, windows or readings (count) from which it is known what is usual, and how far it varies."""
    repeats: int = 2
    """Times (count) from which something has happened again: one may be a slow moment, bad luck or a lost record, and
    two blocks of slow transfers are ten steps to detection. Source: convention."""
    min_times: int = 3
    """Times (count) from which something is not an accident: a median needs three values, steps after an error may have
    been printed late. Source: convention."""
    trend_values: int = 5
    """Values (count) that show a rhythm, a trend or their noise. Source: convention."""
    many_values: int = 8
    """Values (count) from which their level and spread are robust estimates: ranks of a group, blocks, samples. Of
    fewer ranks the spread is their largest deviation."""
    minor_ratio: float = 1 / 3
    """Part of a whole below which it is a side effect (ratio). Source: a rank short of CPU is slow in everything."""
    explained_ratio: float = 0.5
    """Part of a whole from which it explains the whole (ratio)."""
    agreement_ratio: float = 0.7
    """Part of a whole that counts as nearly all of it (ratio): of the observations that must agree, and of an excess
    that one phase must hold to be named. A rank that is slow in all its computing has some 60 % of it in backward."""
    interval_sigmas: float = 2.0
    """Standard errors of a mean that may be chance. Source: convention, 95 %."""
    sure_sigmas: float = 3.0
    """The same that is not chance: a rank's mean excess lasts, and a rise dates an onset. Half a rise is then 1.5
    sigmas, and two steps that are disturbed one after the other are rare."""
    outlier_sigmas: float = 4.0
    """Standard deviations from which a single value is not one of its peers. Source: where many places are tried, the
    bound for the largest of as many normal variables is taken if it is higher."""
    certain_sigmas: float = 6.0
    """Standard deviations from which a change is certain that nothing else confirms."""
    burst_sigmas: float = 9.0
    """Effect / noise from which the least number of observations is enough; below, proportionally more are needed. A
    burst of another job on a crowded machine is 3 to 6 times the noise and lasts 10 to 20 steps."""
    slow_factor: float = 1.5
    """Value / the usual or planned one from which it stands out (ratio): transfers of a ring vary by 10 to 20 %, and a
    plan assumes half of the devices' peak. Source: convention."""
    doubled_factor: float = 2.0
    """Value / the usual or former one, or that of the others, from which it is clearly larger (ratio). Source:
    convention."""
    clear_factor: float = 3.0
    """Value / the usual one that needs no other evidence (ratio): a transfer that costs little yet, a learning rate
    (warm-up grows by less per step), an expert's load, a switch's latency, the age of a save. Source: convention."""
    beyond_factor: float = 1.4
    """Effect / the largest that any rank, group or window shows elsewhere."""
    beyond_few_factor: float = 2.0
    """The same where few are there to compare with, or where the effect is over."""
    min_excess_ms: float = 0.3
    """Smallest excess per step (ms): below, the grain of the timer and the scheduler is measured."""
    min_share_ratio: float = 0.005
    """Smallest excess as a share of the whole, of a step or a level (ratio): one in a part of a step that takes next to
    no time costs nothing."""
    min_gain_ratio: float = 0.01
    """Part of the time from which its loss is worth acting on (ratio). Source: convention."""
    min_change_ratio: float = 0.02
    """Part from which a change, or work that can be moved, counts (ratio): repeated runs of one configuration differ by
    1 to 2 %. Source: convention."""
    saving_ratio: float = 0.05
    """Part of the time or of a size from which a cost that a setting avoids, or a growth, matters (ratio). Ranks that
    share cores are late for each other by a few percent. Source: convention."""
    window_samples: int = 20
    """Newest samples of gradients or experts (count) that are judged. Source: convention."""
    slow_change_steps: int = 200
    """Newest steps (count) over which a slow change is read: an allocator fills in the first hundred, the noise scale
    grows tenfold in them. Source: measured."""
    cost_ratio: float = 0.1
    """Part of the time from which a cost, or time that was not measured, matters (ratio). Source: convention; of a
    job's slowdown Lin et al., OSDI 2025."""
    large_share_ratio: float = 0.2
    """Part of a whole that is a large one (ratio), as of the time from which an alert is a warning. Source: convention;
    a cache is rarely five times what it ever held."""
    severe_share_ratio: float = 0.3
    """Part of a whole that no healthy job has (ratio): bubbles beyond the schedule's, waiting for one rank, padding
    (batches of random lengths have 10 to 25 %). Source: convention."""
    nearly_all_ratio: float = 0.95
    """Part of a whole that is all of it but for chance (ratio). Source: convention."""
    loaded_ratio: float = 0.2
    """GPU utilisation (ratio) from which a reading is one under load. Source: convention."""
    equal_ratio: float = 0.1
    """Difference up to which two distances, sizes or measurements are equal (ratio). Source: convention; stamps and
    traces of an H200 differ by at most 0.061 where both are right, and by 0.17 to 0.25 with two hardware queues."""
    same_ratio: float = 0.01
    """Difference up to which two numbers are the same but for rounding (ratio). Source: logged values have three
    digits, and batches are rounded to ranks."""
    min_payload_bytes: int = 1024
    """Payload of a collective (bytes) that counts as traffic: loss, norms and votes are smaller."""
    queued_ns: int = 50_000
    """Gap (ns) up to which a kernel was queued behind the former one of its group. Source: launching takes longer."""


SHARED = SharedPolicy()
