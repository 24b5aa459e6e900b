"""A rank whose own gradients, before they are reduced, are not what they must be: neither NaN nor a spike of the total.

    detector = GradientOutlierDetector()
    outlier = detector.observe([0.12, 0.97, 8e30, 0.10])     # each rank's peak at this step; None, or rank 2
    findings = analyze(store)                                # kind gradient_corrupted, from the trainer's events

A peak is the largest absolute value among a rank's gradients. One flipped bit changes one element: in a norm it drowns
among a million others unless it is enormous, in the peak it shows as soon as it is larger than what is usual.

1. Of each rank: the logarithm of its peak, less the median of its own last `window` steps. So ranks need not be alike
   (stages, shards), only steady.
2. Less the median of the same over the other ranks: what happens to all (a rate, a hard batch) is nobody's.
3. An outlier rises by more than `min_ratio`, and than `min_sigmas` robust deviations of what (2) was in the window;
   or by more than `max_ratio`.

That alone convicts nobody: one rank's share of a batch may be hard. The trainer drops the step and computes it again
from the same state. What comes back is the batch's and is taken; what does not was made by no batch and no weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.finding import Finding
from analyzers.robust import sigma
from analyzers.run.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["GradientOutlier", "GradientOutlierDetector", "GradientOutlierPolicy", "analyze"]

Row = npt.NDArray[np.float64]
LEAST_SPREAD = 1e-3
"""Of the logarithms: ranks that always agree to the last bit are not all that a step may bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOutlierPolicy:
    """When a step is worth a second look. A false alarm costs one step, so it may be had now and then."""

    window: int = 24
    """Steps of history."""
    warm_up_steps: int = 8
    """Steps before the first judgement: a robust deviation of fewer is none."""
    min_ratio: float = 4.0
    """Rise over what the rank's own past and the others let expect; below that a flip does no harm."""
    min_sigmas: float = 8.0
    """Robust standard deviations: shares of a batch differ, and by more the smaller they are. With tails as heavy as
    Student's t with 4 degrees of freedom, one step in 1,000 is computed twice for nothing."""
    max_ratio: float = 100.0
    """A rise above it is looked at however much the ranks differ: 60 times is 8 sigmas of four ranks with two sequences
    each, 10,000 times of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOutlier:
    """One rank at one step. `ratio`: its peak over the expected one."""

    rank: int
    peak: float
    ratio: float
    sigmas: float


class GradientOutlierDetector:
    """Sees every step's peaks; all ranks' detectors agree because they see the same numbers."""

    def __init__(self, policy: GradientOutlierPolicy | None = None) -> None:
        self.policy = policy or GradientOutlierPolicy()
        self._logs: deque[Row] = deque(maxlen=self.policy.window)
        self._rises: deque[Row] = deque(maxlen=self.policy.window)

    def observe(self, peaks: Sequence[float]) -> GradientOutlier | None:
        """Judge one step. Peaks that are zero, unknown or not finite say nothing, and then nobody is judged."""
        if len(peaks) < 2 or not all(math.isfinite(peak) and peak > 0 for peak in peaks):
            return None
        logs = np.log(np.asarray(peaks, dtype=np.float64))
        if self._logs and len(self._logs[0]) != len(logs):
            self._logs.clear()
            self._rises.clear()
        rises = self._relative(logs)
        found = self._judge(peaks, rises)
        if found is None:
            self._take(logs, rises)
        return found

    def learn(self, peaks: Sequence[float]) -> None:
        """Take a step into the history: healthy ones by themselves, others once they turned out to be."""
        logs = np.log(np.asarray(peaks, dtype=np.float64))
        self._take(logs, self._relative(logs))

    def _take(self, logs: Row, rises: Row | None) -> None:
        if rises is not None:
            self._rises.append(rises)
        self._logs.append(logs)

    def _relative(self, logs: Row) -> Row | None:
        if not self._logs:
            return None
        own = logs - np.median(np.stack(self._logs), axis=0)
        return own - _median_of_others(own)

    def _judge(self, peaks: Sequence[float], rises: Row | None) -> GradientOutlier | None:
        policy = self.policy
        if rises is None or len(self._rises) < policy.warm_up_steps:
            return None
        spread = max(sigma(np.stack(self._rises), center=0.0), LEAST_SPREAD)
        limit = min(max(math.log(policy.min_ratio), policy.min_sigmas * spread), math.log(policy.max_ratio))
        standing_out = np.flatnonzero(rises >= limit)
        if len(standing_out) != 1:
            return None  # nobody, or not one rank's doing
        rank = int(standing_out[0])
        rise = float(rises[rank])
        return GradientOutlier(rank=rank, peak=peaks[rank], ratio=math.exp(rise), sigmas=rise / spread)


def _median_of_others(values: Row) -> Row:
    """For each value the median of all but itself."""
    order = np.argsort(values, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(values))
    ordered = values[order]
    middle = (len(values) - 1) // 2
    middles = (middle,) if len(values) % 2 == 0 else (middle - 1, middle)
    found: Row = np.mean([ordered[index + (place <= index)] for index in middles], axis=0)
    return found


def analyze(source: Source) -> list[Finding]:
    """One finding for each step whose gradients a rank computed otherwise the second time."""
    events = EventLog.load(source, (event_kinds.GRADIENT_OUTLIER,)).of(event_kinds.GRADIENT_OUTLIER)
    return [_finding(event) for event in events if event.detail.get("came_back") is False]


def _finding(event: Event) -> Finding:
    rank, ratio = event.integer("outlier_rank"), event.number("ratio") or 0.0
    device = event.text("device", "an unknown device")
    return Finding(
        analyzer="gradient_outlier",
        kind="gradient_corrupted",
        severity="warning",
        status="fired",
        ranks=(rank,) if rank >= 0 else (),
        first_step=event.step,
        last_step=event.step,
        cause="gradient",
        summary=(
            f"step {event.step}: the gradients of rank {rank} were {ratio:.3g} times what was to be expected, and were "
            f"not when the step was computed again; {device} changed them. The step was dropped and taken again"
        ),
        evidence={
            "peak": event.number("peak"),
            "peak_again": event.number("peak_again"),
            "ratio": ratio,
            "sigmas": event.number("sigmas"),
            "device": device,
            "count_on_device": event.integer("count"),
        },
        advice="gradient-corrupted",
        attempt=event.attempt,
    )
