"""The training loop.

    outcome = train(session)        # "finished" or "stopped"

A step from top to bottom: batch, forward and backward, one small reduction (loss and whether anybody was asked to
stop), clipping, the guard's verdict, and then either the optimizer's step or the way back to a good state. Every rank
comes to the same verdict because every number it depends on was reduced.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from probes.recorder import Recorder
from trainer.checkpoint.state import Position
from trainer.recovery.rollback import Recovery
from trainer.training import Training

__all__ = ["Session", "train"]


class GradientWatcher(Protocol):
    """What of `probes.gradients.GradientProbe` is used here."""

    def after_backward(self, step: int) -> object: ...


@dataclass(kw_only=True)
class Session:
    """Everything that one rank's loop works with."""

    training: Training
    recorder: Recorder
    recovery: Recovery
    gradients: GradientWatcher | None = None
    asked_to_stop: Callable[[], bool] = lambda: False
    prints_progress: bool = False
    _printed_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all ranks know of a step."""

    loss: float
    stop: bool


def train(session: Session) -> str:
    """Train to the last step, or until all ranks have agreed to stop. Saves a checkpoint at the end of either."""
    position = session.recovery.start()
    stop = False
    while position.step < session.training.config.train.steps and not stop:
        with session.recorder.step(position.step + 1):
            position, stop = _step(session, position)
    session.recovery.save(position)
    return "stopped" if stop else "finished"


def _step(session: Session, position: Position) -> tuple[Position, bool]:
    """One step; returns the position after it, which lies before it if the training went back."""
    training, recorder, recovery = session.training, session.recorder, session.recovery
    step, batch_index = position.step + 1, position.batch_index
    batch = training.batch(batch_index)
    recorder.log(batch_index=batch_index, tokens=batch.inputs.numel())

    local_loss = training.forward_backward(batch)
    if session.gradients is not None:
        session.gradients.after_backward(step)
    with recorder.span("optimizer"):
        reading = _agree(training, local_loss, session.asked_to_stop())
    norm = float(training.clip())
    own_loss = float(local_loss) if training.has_loss else math.nan
    recorder.log(loss=reading.loss, grad_norm=norm, committed=False)
    if training.has_loss:
        recorder.log(local_loss=own_loss)

    if training.absorb_overflow(norm):
        return Position(step=position.step, batch_index=recovery.ledger.next_batch(batch_index + 1)), reading.stop
    verdict = recovery.guard.judge(step, reading.loss, norm)
    if not verdict.healthy:
        return recovery.refuse(verdict, position, batch_index, own_loss), reading.stop

    rate = training.step(step - 1)
    recorder.log(lr=rate, committed=True)
    _print_progress(session, step, reading.loss, norm, rate)
    position = recovery.taken(position, batch_index)
    _evaluate(session, step)
    return position, reading.stop


def _agree(training: Training, local_loss: Tensor, stop: bool) -> Reading:
    """The step's one reduction besides the gradients': mean loss and whether any rank was asked to stop."""
    if training.plan.world_size == 1:
        return Reading(loss=float(local_loss), stop=stop)
    # Tensor-parallel ranks each add the same loss; pipeline ranks without one add nothing.
    copies = training.plan.data_size * training.plan.tp
    share = local_loss.double() / copies if training.has_loss else torch.zeros_like(local_loss).double()
    row = torch.stack((share, torch.full_like(share, float(stop))))
    dist.all_reduce(row)
    loss, stops = row.tolist()
    return Reading(loss=loss, stop=stops > 0)


def _evaluate(session: Session, step: int) -> None:
    interval = session.training.config.train.eval_interval
    if not interval or step % interval or session.training.validation is None:
        return
    with session.recorder.span("evaluate"):
        loss = float(session.training.evaluate())
    if session.training.rank == 0:
        session.recorder.event("evaluation", loss=loss)


def _print_progress(session: Session, step: int, loss: float, norm: float, rate: float) -> None:
    config = session.training.config.train
    if not session.prints_progress or (step % config.log_interval and step != config.steps):
        return
    now, before = time.monotonic(), session._printed_at
    session._printed_at = now
    figures = f"loss {loss:.4f}  grad_norm {norm:.3f}  lr {rate:.2e}  {now - before:.2f} s"
    sys.stdout.write(f"step {step}/{config.steps}  {figures}\n")
    sys.stdout.flush()
