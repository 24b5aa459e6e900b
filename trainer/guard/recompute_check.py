"""Computes a step again when one rank's gradients, before they were reduced, stand out; and says what that came to.

    look = SecondLook(training, recorder, ledger)
    votes = look.votes()                       # this rank's largest gradient, in its own place of the step's reduction
    look.counted(sums)
    if look.wanted(step, batch_index): ...     # drop the gradients and train the same batch again

A flip in a gradient reaches all replicas alike through the reduction, so no comparison of states sees it afterwards.
Nothing has been updated when it is seen, so nothing has to be restored: the same batch on the same state gives the
right gradients, and the run that follows is, bit for bit, the run without the flip. If the peak comes back, the batch
is what it is, and the step is taken. No rank communicates more than before; the probe of the collectives reads every
buffer before it is reduced anyway. Needs `probes.collectives.wrapped` and CPU tensors; says nothing elsewhere.
"""

from __future__ import annotations

import math
import socket

from analyzers.corruption.gradient_outlier import GradientOutlier, GradientOutlierDetector
from probes.collectives.wrapped import take_gradient_peaks
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from trainer.checkpoint.agreement import everyone
from trainer.training.rank_training import Training

__all__ = ["SecondLook"]

MAX_RANKS = 1024
"""Above, the row of peaks would be longer than what it rides on is worth."""
SAME_RATIO = 1.05
"""Peaks of two computations of one step that agree: the same sums, on a GPU in another order."""


class SecondLook:
    """One rank's share; all ranks come to the same because they see the same numbers."""

    def __init__(self, training: Training, recorder: Recorder, ledger: Ledger) -> None:
        config, plan = training.config, training.plan
        self.training = training
        self.recorder = recorder
        self.ledger = ledger
        probed = config.probes.enabled and config.probes.collectives and config.probes.nonfinite_flags
        # Over the shards comes first; what is then reduced over the replicas is no longer a rank's own.
        self._dimension = "dp_shard" if plan.dp_shard > 1 else "dp_replicate" if plan.dp_replicate > 1 else ""
        if plan.world_size in (plan.dp_shard, plan.dp_replicate):
            self._dimension = "world"
        on_host = training.device.type == "cpu"  # elsewhere it would be a pass more over all gradients, and a wait
        applies = probed and on_host and config.recovery.enabled and self._dimension and plan.world_size <= MAX_RANKS
        self.num_votes = plan.world_size if applies else 0
        self.detector = GradientOutlierDetector()
        self.worn = ""
        """The device that was last found to have changed gradients."""
        self._peaks: list[float] = []
        self._first: tuple[int, GradientOutlier, list[float]] | None = None

    def votes(self) -> list[float]:
        """As many numbers on all ranks."""
        if not self.num_votes:
            return []
        row = [0.0] * self.num_votes
        peak = take_gradient_peaks().get(self._dimension, 0.0)
        row[self.training.rank] = 0.0 if math.isnan(peak) else peak  # a NaN is the guard's, and would say nothing
        return row

    def counted(self, sums: list[float]) -> None:
        self._peaks = sums

    def wanted(self, step: int, batch_index: int) -> bool:
        """Whether to compute this step again. All ranks; collective in the step in which a device is named."""
        if not self._peaks:
            return False
        if self._first is not None and self._first[0] == step:
            self._settle(step, batch_index)
            return False
        self._first = None
        outlier = self.detector.observe(self._peaks)
        if outlier is None:
            return False
        self._first = (step, outlier, self._peaks)
        return True

    def _settle(self, step: int, batch_index: int) -> None:
        assert self._first is not None
        _, outlier, before = self._first
        self._first = None
        again = self._peaks[outlier.rank]
        came_back = not math.isfinite(again) or outlier.peak < SAME_RATIO * again
        if math.isfinite(again) and all(peak > 0 for peak in self._peaks):
            self.detector.learn(self._peaks)
        place = f"{socket.gethostname()} {self.training.device}"
        device = everyone(place)[outlier.rank] + (f" rank {outlier.rank}" if self.training.device.type == "cpu" else "")
        if not came_back:
            self.ledger.corruptions[device] = self.ledger.corruptions.get(device, 0) + 1
            self.worn = device
        if self.training.rank == 0:
            self.recorder.event(
                "gradient_outlier",
                step=step,
                batch_index=batch_index,
                outlier_rank=outlier.rank,
                device=device,
                peak=before[outlier.rank],
                peak_again=again,
                ratio=outlier.ratio,
                sigmas=outlier.sigmas,
                came_back=came_back,
                count=self.ledger.corruptions.get(device, 0),
            )
