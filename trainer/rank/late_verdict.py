"""Verdict one step late: the host reads a step's numbers while the device computes the step after it.

    late = late_verdict(training, recorder, recovery)          # None if each step must be read immediately
    if late.lags(step):
        late.take(position, batch, numbers)                    # update enqueued, nothing read
    ...forward and backward of the next step...
    settled = late.settle()                                     # the numbers of the step before

1. A flag on the device is set if the step may be unhealthy: its loss or norm is not finite, or the spike detector
   might refuse its loss (`SpikeDetector.clean_range`). AdamW's fused kernel and Muon's update read the flag. If it is
   set, they skip the update and do not count the step.
2. The next step's forward and backward pass are enqueued. Then the host reads the numbers.
3. If the flag is not set, the step was taken, and the usual work follows: votes, copies, checkpoints.
4. If the flag is set, the state is bitwise the same as before the step. The gradients of the next step are dropped. The
   flagged step is recomputed and judged at once, by the same code as in a run without lag. A NaN that does not recur is
   judged by its first occurrence. So verdicts, rollbacks and weights are bitwise equal to a run that reads each step at
   once. A flagged step that turns out healthy costs one recomputation.

The last step and steps before an evaluation are read immediately. All steps of a run are read at once if
`trainer.layout.step_verdict.reason_to_read_at_once` gives a reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probes.recorder import Recorder
from trainer.checkpoint.state import Position
from trainer.config.load import ConfigError
from trainer.data.batches import Batch
from trainer.guard.recovery import Recovery
from trainer.layout.step_verdict import reason_to_read_at_once
from trainer.rank.step_numbers import StepNumbers, StepResult
from trainer.training.rank_training import Training

__all__ = ["LateVerdict", "Settled", "late_verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A step after its numbers have been read."""

    position: Position
    """Before the step."""
    batch: Batch
    result: StepResult
    rate: float
    is_left_out: bool
    """True if the flag was set, so that the update was skipped."""

    @property
    def step(self) -> int:
        return self.position.step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A step before its numbers have been read."""

    position: Position
    batch: Batch
    numbers: StepNumbers
    rate: float


class LateVerdict:
    """One rank's share; every method is called on all ranks."""

    def __init__(self, training: Training, recorder: Recorder, recovery: Recovery) -> None:
        self.training = training
        self.recorder = recorder
        self.recovery = recovery
        self._pending: _Pending | None = None
        self._repeated: Settled | None = None

    @property
    def is_pending(self) -> bool:
        """Return True if a step has not been read yet."""
        return self._pending is not None

    def lags(self, step: int) -> bool:
        """Return True if the numbers of `step` are read in the next one."""
        train = self.training.config.train
        is_evaluated = bool(train.eval_interval and step % train.eval_interval == 0 and self.training.validation)
        return step < train.steps and not is_evaluated and self._repeated is None

    def take(self, position: Position, batch: Batch, numbers: StepNumbers) -> Position:
        """Enqueue the update of the step after `position`, unless its flag is set; returns the position after it."""
        flag = self._flag(numbers)
        numbers.clipped.add(flag)
        numbers.clipped.send()
        rate = self.training.step(position.step, leave_out=flag.float())
        self.recovery.integrity.after_step(position.step + 1)
        self.recorder.defer()
        self._pending = _Pending(position=position, batch=batch, numbers=numbers, rate=rate)
        ledger = self.recovery.ledger
        return Position(step=position.step + 1, batch_index=ledger.next_batch(position.batch_index + 1))

    def settle(self) -> Settled:
        """Read the pending step, and record it."""
        pending, self._pending = self._pending, None
        assert pending is not None, "no step is pending"
        clipped = pending.numbers.clipped.read()
        settled = Settled(
            position=pending.position,
            batch=pending.batch,
            result=pending.numbers.to_result(clipped),
            rate=pending.rate,
            is_left_out=clipped.own[-1] > 0,
        )
        if settled.is_left_out:
            self.recovery.integrity.left_out(settled.step)
            # Nothing is logged yet: it is not known whether these numbers or those of a repetition belong to the step.
            self._repeated = settled
        else:
            self.recorder.log_late(settled.step, **self._columns(settled), lr=settled.rate, committed=True)
        return settled

    def judged(self, result: StepResult) -> StepResult:
        """Return the numbers by which a step that was read immediately is judged. Usually these are `result`. If the
        step was repeated and only the first numbers were not finite, they are the first numbers, because this shows a
        device fault. This method also completes the record of the first computation, with its numbers if they are
        judged.
        """
        first, self._repeated = self._repeated, None
        if first is None:
            return result
        if _is_finite(first.result) or not _is_finite(result):
            self.recorder.log_late(first.step, committed=False)
            return result
        self.recorder.log_late(first.step, **self._columns(first), committed=False)
        return first.result

    def _columns(self, settled: Settled) -> dict[str, float]:
        result = settled.result
        return {"loss": result.loss, "grad_norm": result.norm, **result.own_columns(has_loss=self.training.has_loss)}

    def _flag(self, numbers: StepNumbers) -> Tensor:
        """Flag on the device: 1 if the step may be unhealthy, otherwise 0; the same on all ranks."""
        guard, loss = self.recovery.guard, numbers.loss
        low, high = guard.detector.clean_range() if guard.enabled else (-math.inf, math.inf)
        return ~(torch.isfinite(numbers.norm) & (loss > low) & (loss < high))


def _is_finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.norm)


def late_verdict(training: Training, recorder: Recorder, recovery: Recovery) -> LateVerdict | None:
    """The late verdict if the configuration enables it. Raises ConfigError if it is enabled but impossible."""
    wanted = training.config.recovery.verdict
    if wanted == "at_once" or (wanted == "auto" and training.device.type != "cuda"):
        return None
    on_host = training.device.type == "cpu"
    if reason := reason_to_read_at_once(training.config, training.plan, on_host=on_host):
        if wanted == "late":
            raise ConfigError(f'recovery.verdict = "late": {reason}; must be "auto" or "at_once"')
        return None
    return LateVerdict(training, recorder, recovery)
