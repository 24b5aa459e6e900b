"""The training loop.

    outcome = train(session)        # "finished" or "stopped"
    for position, stop in steps(session, position): ...         # the same one step at a time

A step from top to bottom: batch, forward and backward, one small reduction (gradient norm, loss, whether anybody was
asked to stop, and the recovery's votes), clipping, the guard's verdict, and then either the optimizer's step or the way
back to a good state. Every rank comes to the same verdict because every number it depends on was reduced.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from probes.recorder import Recorder
from trainer.checkpoint.state import Position
from trainer.guard.rollback import Recovery
from trainer.training.rank_training import Training

__all__ = ["Session", "train"]


class Watcher(Protocol):
    """What of `probes.gradients.GradientProbe` and `probes.expert_load.ExpertProbe` is used here."""

    def after_backward(self, step: int) -> object: ...


class UnreducedGradients(Protocol):
    """What of `probes.collectives.local_gradient.Unreduced` is used here."""

    def begin(self, device: torch.device) -> None: ...

    def end(self) -> Tensor: ...


@dataclass(kw_only=True)
class Session:
    """Everything that one rank's loop works with."""

    training: Training
    recorder: Recorder
    recovery: Recovery
    gradients: Watcher | None = None
    experts: Watcher | None = None
    unreduced: UnreducedGradients | None = None
    """None where ranks' own gradients are not whole, or are not told apart from other reductions."""
    asked_to_stop: Callable[[], bool] = lambda: False
    prints_progress: bool = False
    _printed_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a step came to. `own_loss` and `own_norm` are this rank's (NaN if it has none), the rest is the same on all
    ranks."""

    loss: float
    norm: float
    stop: bool
    own_loss: float
    own_norm: float
    """Of this rank's own gradient, before it was reduced; NaN in most steps."""
    compression_error: float | None = None
    """Of the reduced gradient, relative to the one without compression; None if it was not measured."""


def train(session: Session) -> str:
    """Train to the last step, or until all ranks have agreed to stop. Saves a checkpoint at the end of either."""
    position, stop = session.recovery.start(), False
    walk = steps(session, position)
    while (after := next(walk, None)) is not None:
        position, stop = after
    session.recovery.end(position)
    return "stopped" if stop else "finished"


def steps(session: Session, position: Position) -> Iterator[tuple[Position, bool]]:
    """Take one step at each `next`, from `position` on; gives where that led, and whether it was the last as asked."""
    stop = False
    while position.step < session.training.config.train.steps and not stop:
        with session.recorder.step(position.step + 1):
            position, stop = _step(session, position)
        yield position, stop


def _step(session: Session, position: Position) -> tuple[Position, bool]:
    """One step; returns the position after it, which lies before it if the training went back."""
    training, recorder, recovery = session.training, session.recorder, session.recovery
    config, step, batch_index = training.config, position.step + 1, position.batch_index
    batch = training.batch(batch_index)
    recorder.log(batch_index=batch_index, tokens=batch.inputs.numel())

    sampled = config.probes.compression_interval if recorder.enabled else 0
    training.sample_compression(_is_due(step, sampled))
    unreduced = session.unreduced if _is_due(step, config.probes.local_norm_interval) else None
    if unreduced is not None:
        unreduced.begin(training.device)
    local_loss = training.forward_backward(batch)
    own_square = unreduced.end() if unreduced is not None else None
    for watcher in (session.gradients, session.experts):
        if watcher is not None:
            watcher.after_backward(step)
    reading = _read(session, local_loss, own_square)
    if recovery.computes_again(position, batch_index):
        recorder.log(committed=False)  # without its numbers: they are not the step's
        return position, reading.stop
    own = {"local_loss": reading.own_loss} if training.has_loss else {}
    if math.isfinite(reading.own_norm):
        own["local_grad_norm"] = reading.own_norm
    if reading.compression_error is not None:
        own["compression_error"] = reading.compression_error
    recorder.log(loss=reading.loss, grad_norm=reading.norm, committed=False, **own)

    if training.absorb_overflow(reading.norm):
        return Position(step=position.step, batch_index=recovery.ledger.next_batch(batch_index + 1)), reading.stop
    verdict = recovery.guard.judge(step, reading.loss, reading.norm)
    if not verdict.healthy:
        own_loss = reading.own_loss if training.has_loss else None
        return recovery.refuse(verdict, position, batch, own_loss), reading.stop

    rate = training.step(step - 1)
    recorder.log(lr=rate, committed=True)
    _print_progress(session, step, reading, rate)
    position = recovery.taken(position, batch_index)
    _evaluate(session, step)
    return position, reading.stop


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _read(session: Session, local_loss: Tensor, own_square: Tensor | None) -> Reading:
    """Clip, and read what the verdict needs, by the step's one reduction besides the gradients'.

    The host waits for the device here, and nowhere else in a step that is taken: all numbers come back at once.
    """
    training, recovery = session.training, session.recovery
    own = local_loss.double().view(1)
    # Tensor-parallel ranks each add the same loss; pipeline ranks without one add nothing.
    share = own / training.plan.loss_copies if training.has_loss else torch.zeros_like(own)
    said = torch.tensor([float(session.asked_to_stop()), *recovery.votes()], dtype=torch.float64)
    said = said.to(own.device, non_blocking=True)
    square = own.new_full((1,), math.nan) if own_square is None else own_square
    squares, error = training.compression_squares(), None
    beside = (own, square) if squares is None else (own, square, squares)
    norm, loss, stops, *rest = training.clip(share, said, beside=beside)
    if squares is not None:
        *rest, wrong, whole = rest
        error = math.sqrt(wrong / whole) if whole > 0 else math.nan
    *votes, own_loss, own_square_sum = rest
    recovery.counted(votes)
    scale = training.scaler.scale if training.scaler is not None else 1.0
    return Reading(
        loss=loss,
        norm=norm,
        stop=stops > 0,
        own_loss=own_loss if training.has_loss else math.nan,
        own_norm=math.sqrt(own_square_sum) / scale,
        compression_error=error,
    )


def _evaluate(session: Session, step: int) -> None:
    interval = session.training.config.train.eval_interval
    if not interval or step % interval or session.training.validation is None:
        return
    with session.recorder.span("evaluate"):
        loss = float(session.training.evaluate())
    if session.training.rank == 0:
        session.recorder.event("evaluation", loss=loss)


def _print_progress(session: Session, step: int, reading: Reading, rate: float) -> None:
    config = session.training.config.train
    if not session.prints_progress or (step % config.log_interval and step != config.steps):
        return
    now, before = time.monotonic(), session._printed_at
    session._printed_at = now
    figures = f"loss {reading.loss:.4f}  grad_norm {reading.norm:.3f}  lr {rate:.2e}  {now - before:.2f} s"
    sys.stdout.write(f"step {step}/{config.steps}  {figures}\n")
    sys.stdout.flush()
