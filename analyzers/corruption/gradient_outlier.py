"""Local gradients of one rank that are outliers, although they are finite and the global norm has no spike.

    detector = GradientOutlierDetector()
    outlier = detector.observe([0.12, 0.97, 8e30, 0.10])     # each rank's peak at this step; None, or rank 2
    findings = corrupted_gradients(store, Scope())           # kind gradient_corrupted, from the trainer's events

A peak is the largest absolute value among a rank's gradients before they are reduced. One flipped bit changes one
element. A norm over a million elements hides all but an enormous change, but the peak shows it.

1. For each rank, take the logarithm of its peak and subtract the logarithm's median over the last `window_steps`
   steps. So ranks may differ (stages, shards), as long as each is steady.
2. Subtract the median of this value over the other ranks. This cancels effects on all ranks (learning rate, hard
   batch). The result is the rank's rise.
3. A rank is an outlier if its rise reaches both `min_ratio` and `min_sigmas` robust standard deviations of the rises
   in the window, or reaches `max_ratio`. If several ranks are outliers, none is reported.

An outlier alone proves nothing: one rank's share of a batch may be hard. The trainer drops the step and computes it
again from the same state. If the peak repeats, the batch caused it and the step is taken. If not, the device caused it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.corruption.policy import GradientOutlierPolicy
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.robust import others_median, sigma
from analyzers.run.records.event_log import Event, EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["GradientOutlier", "GradientOutlierDetector", "corrupted_gradients"]

Row = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOutlier:
    """One rank at one step. `ratio`: its peak over the expected one."""

    rank: int
    peak: float
    ratio: float
    sigmas: float


class GradientOutlierDetector:
    """Judges the peaks of every step. All ranks reach the same result, because they see the same numbers."""

    def __init__(self, policy: GradientOutlierPolicy | None = None) -> None:
        self.policy = policy or GradientOutlierPolicy()
        self._logs: deque[Row] = deque(maxlen=self.policy.window_steps)
        self._rises: deque[Row] = deque(maxlen=self.policy.window_steps)

    def observe(self, peaks: Sequence[float]) -> GradientOutlier | None:
        """Judge one step; None without an outlier. A step with a zero, unknown or non-finite peak is not judged."""
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
        """Add a step to the history. `observe` adds steps without an outlier itself. If the recomputation gives the
        same outlier, the caller adds the step."""
        logs = np.log(np.asarray(peaks, dtype=np.float64))
        self._take(logs, self._relative(logs))

    def _take(self, logs: Row, rises: Row | None) -> None:
        if rises is not None:
            self._rises.append(rises)
        self._logs.append(logs)

    def _relative(self, logs: Row) -> Row | None:
        if not self._logs:
            return None
        rises = logs - np.median(np.stack(self._logs), axis=0)
        return rises - others_median(rises[:, np.newaxis])[:, 0]

    def _judge(self, peaks: Sequence[float], rises: Row | None) -> GradientOutlier | None:
        policy = self.policy
        if rises is None or len(self._rises) < SHARED.many_values:
            return None
        spread = max(sigma(np.stack(self._rises), center=0.0), 1e-9)  # ranks may agree bitwise, so the spread may be 0
        limit = min(max(math.log(policy.min_ratio), policy.min_sigmas * spread), math.log(policy.max_ratio))
        outliers = np.flatnonzero(rises >= limit)
        if len(outliers) != 1:
            return None
        rank = int(outliers[0])
        rise = float(rises[rank])
        return GradientOutlier(rank=rank, peak=peaks[rank], ratio=math.exp(rise), sigmas=rise / spread)


def corrupted_gradients(source: Source, scope: Scope) -> list[Finding]:
    """One finding for each step in which a rank's outlier did not come back when the step was recomputed."""
    log = EventLog.load(source, (event_kinds.GRADIENT_OUTLIER,))
    events = log.of(event_kinds.GRADIENT_OUTLIER, attempt=scope.attempt)
    return [_finding(event) for event in events if event.detail.get("came_back") is False]


def _finding(event: Event) -> Finding:
    rank, ratio = event.integer("outlier_rank"), event.number("ratio") or 0.0
    device = event.text("device")
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
            f"Gradients of rank {rank} were {ratio:.3g}x too large at step {event.step}, and normal when recomputed. "
            f"Suspect its device{f' ({device})' if device else ''}."
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
