"""Recompute a step whose local gradients are outliers on one rank, to tell a faulty device from unusual data.

    check = RecomputeCheck(training, recorder, ledger)
    peaks = check.vote()                       # this rank's largest gradient, at its index in the step's votes
    check.observe(summed_peaks)                # peaks of all ranks
    decision = check.decide(step, batch_index)
    if decision.recompute: ...                 # drop the gradients and train the same batch again

A bit flip in a gradient reaches all replicas through the reduction, so no comparison of states sees it afterwards. This
check detects it before any update, so nothing has to be restored: recomputing the same batch on the same state gives
the right gradients, and the run continues bitwise as without the flip. If the peak recurs, the batch is unusual, and
the step is taken. The check adds no communication and no pass over the gradients: the collectives probe reads every
buffer before it is reduced anyway. It needs `probes.collectives.wrapped` and CPU tensors, and is otherwise inactive.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from analyzers.corruption.gradient_outlier import GradientOutlier, GradientOutlierDetector
from probes.collectives.wrapped import take_gradient_peaks
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from probes.tape import event_kinds
from trainer.checkpoint.agreement import gather_from_all
from trainer.layout.step_verdict import compared_over
from trainer.training.rank_training import Training

__all__ = ["RecomputeCheck", "RecomputeDecision"]

SAME_RATIO = 1.05
"""Relative tolerance for peaks of two computations of one step, since a GPU sums in varying order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeDecision:
    """Decision about a step, the same on all ranks."""

    recompute: bool = False
    suspect_device: str = ""
    """The device that corrupted gradients, if the second computation has identified it; otherwise empty."""


class RecomputeCheck:
    """The check on one rank. All ranks make the same decision because they see the same numbers."""

    def __init__(self, training: Training, recorder: Recorder, ledger: Ledger) -> None:
        config, plan = training.config, training.plan
        self.training = training
        self.recorder = recorder
        self.ledger = ledger
        self._dimension = compared_over(config, plan, on_host=training.device.type == "cpu")
        self._num_peaks = plan.world_size if self._dimension else 0
        if self._dimension:
            take_gradient_peaks()  # called now, so that gradients of the first step are measured
        self.detector = GradientOutlierDetector()
        self._peaks: tuple[float, ...] = ()
        self._first: tuple[int, GradientOutlier, tuple[float, ...]] | None = None

    def vote(self) -> tuple[float, ...]:
        """A row with this rank's peak at the index of the rank, and zeros elsewhere; empty if gradients are not
        checked."""
        if not self._num_peaks:
            return ()
        row = [0.0] * self._num_peaks
        peak = take_gradient_peaks().get(self._dimension, 0.0)
        # A NaN is not passed on as a peak, because it cannot be compared; the guard handles it.
        row[self.training.rank] = 0.0 if math.isnan(peak) else peak
        return tuple(row)

    def observe(self, peaks: tuple[float, ...]) -> None:
        """Take the peaks of all ranks."""
        self._peaks = peaks

    def decide(self, step: int, batch_index: int) -> RecomputeDecision:
        """Decide whether to recompute this step. All ranks. Collective after a recomputation, to name the device."""
        first, self._first = self._first, None
        if not self._peaks:
            return RecomputeDecision()
        if first is not None and first[0] == step:
            return RecomputeDecision(suspect_device=self._compare(step, batch_index, *first[1:]))
        outlier = self.detector.observe(list(self._peaks))
        if outlier is not None:
            self._first = (step, outlier, self._peaks)
        return RecomputeDecision(recompute=outlier is not None)

    def _compare(self, step: int, batch_index: int, outlier: GradientOutlier, before: tuple[float, ...]) -> str:
        """Compare two computations of a step; returns the faulty device, or "" if the peak recurred."""
        second_peak = self._peaks[outlier.rank]
        came_back = not math.isfinite(second_peak) or outlier.peak < SAME_RATIO * second_peak
        if math.isfinite(second_peak) and all(peak > 0 for peak in self._peaks):
            self.detector.learn(list(self._peaks))
        place = f"{socket.gethostname()} {self.training.device}"
        device = gather_from_all(place)[outlier.rank] + (
            f" rank {outlier.rank}" if self.training.device.type == "cpu" else ""
        )
        if not came_back:
            self.ledger.corruptions[device] = self.ledger.corruptions.get(device, 0) + 1
        if self.training.rank == 0:
            self.recorder.event(
                event_kinds.GRADIENT_OUTLIER,
                step=step,
                batch_index=batch_index,
                outlier_rank=outlier.rank,
                device=device,
                peak=before[outlier.rank],
                peak_again=second_peak,
                ratio=outlier.ratio,
                sigmas=outlier.sigmas,
                came_back=came_back,
                count=self.ledger.corruptions.get(device, 0),
            )
        return "" if came_back else device
