"""The training loop of one rank.

    outcome = train(session)        # "finished" or "stopped"
    for position, stop in steps(session, position): ...         # the same one step at a time

A step from top to bottom: batch, forward and backward, one small reduction (gradient norm, loss and the votes),
clipping, the guard's verdict, and then either the optimizer's step or a rollback. Every rank comes to the same verdict
because every number it depends on was reduced.
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
from probes.tape import event_kinds
from trainer.checkpoint.state import Position
from trainer.guard.recovery import Recovery
from trainer.guard.votes import StepVotes
from trainer.training.rank_training import Training

__all__ = ["Session", "train"]


class BackwardProbe(Protocol):
    """The part of `probes.gradients.GradientProbe` and `probes.expert_load.ExpertProbe` that is used here."""

    def after_backward(self, step: int) -> object: ...


class UnreducedGradients(Protocol):
    """The part of `probes.collectives.local_gradient.Unreduced` that is used here."""

    def begin(self, device: torch.device) -> None: ...

    def end(self) -> Tensor: ...


@dataclass(kw_only=True)
class Session:
    """The collaborators of one rank's loop."""

    training: Training
    recorder: Recorder
    recovery: Recovery
    gradients: BackwardProbe | None = None
    experts: BackwardProbe | None = None
    unreduced: UnreducedGradients | None = None
    """None where local gradients are not whole, or cannot be distinguished from other reductions."""
    asked_to_stop: Callable[[], bool] = lambda: False
    prints_progress: bool = False
    _printed_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The numbers of one step. `own_loss` and `own_norm` are this rank's (NaN if it has none), the rest is the same on
    all ranks."""

    loss: float
    norm: float
    votes: StepVotes
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
    for probe in (session.gradients, session.experts):
        if probe is not None:
            probe.after_backward(step)
    result = _reduce(session, local_loss, own_square)
    stop = result.votes.stop > 0
    recovery.apply_votes(result.votes)
    if recovery.recompute(position, batch_index):
        recorder.log(committed=False)  # without its numbers: they are not the step's
        return position, stop
    own = {"local_loss": result.own_loss} if training.has_loss else {}
    if math.isfinite(result.own_norm):
        own["local_grad_norm"] = result.own_norm
    if result.compression_error is not None:
        own["compression_error"] = result.compression_error
    recorder.log(loss=result.loss, grad_norm=result.norm, committed=False, **own)

    if training.absorb_overflow(result.norm):
        return Position(step=position.step, batch_index=recovery.ledger.next_batch(batch_index + 1)), stop
    verdict = recovery.guard.judge(step, result.loss, result.norm)
    if not verdict.healthy:
        own_loss = result.own_loss if training.has_loss else None
        return recovery.refuse(verdict, position, batch, own_loss), stop

    rate = training.step(step - 1)
    recorder.log(lr=rate, committed=True)
    _print_progress(session, step, result, rate)
    position = recovery.taken(position, batch_index)
    _evaluate(session, step)
    return position, stop


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _reduce(session: Session, local_loss: Tensor, own_square: Tensor | None) -> StepResult:
    """Clip, and get the numbers that the verdict needs by the step's one reduction besides the gradients'.

    The host waits for the device here, and nowhere else in a step that is taken: all numbers come back at once.
    """
    training = session.training
    own = local_loss.double().view(1)
    # Tensor-parallel ranks each add the same loss; pipeline ranks without one add nothing.
    share = own / training.plan.loss_copies if training.has_loss else torch.zeros_like(own)
    row = session.recovery.votes(stop=session.asked_to_stop()).to_row()
    votes = torch.tensor(row, dtype=torch.float64).to(own.device, non_blocking=True)
    square = own.new_full((1,), math.nan) if own_square is None else own_square
    squares, error = training.compression_squares(), None
    clipped = training.clip(share, votes, own=(own, square) if squares is None else (own, square, squares))
    loss, *sums = clipped.sums
    own_loss, own_square_sum, *compression = clipped.own
    if compression:
        wrong, whole = compression
        error = math.sqrt(wrong / whole) if whole > 0 else math.nan
    scale = training.scaler.scale if training.scaler is not None else 1.0
    return StepResult(
        loss=loss,
        norm=clipped.norm,
        votes=StepVotes.from_row(sums),
        own_loss=own_loss if training.has_loss else math.nan,
        own_norm=math.sqrt(own_square_sum) / scale,
        compression_error=error,
    )


def _evaluate(session: Session, step: int) -> None:
    interval = session.training.config.train.eval_interval
    if not interval or step % interval or not session.training.validation:
        return
    with session.recorder.span("evaluate"):
        losses = {name: float(loss) for name, loss in session.training.evaluate_sets().items()}
    if session.training.rank == 0:
        mean = sum(losses.values()) / len(losses)
        if any(losses):
            session.recorder.event(event_kinds.EVALUATION, loss=mean, sets=losses)
        else:  # one set without a name
            session.recorder.event(event_kinds.EVALUATION, loss=mean)


def _print_progress(session: Session, step: int, result: StepResult, rate: float) -> None:
    config = session.training.config.train
    if not session.prints_progress or (step % config.log_interval and step != config.steps):
        return
    now, before = time.monotonic(), session._printed_at
    session._printed_at = now
    figures = f"loss {result.loss:.4f}  grad_norm {result.norm:.3f}  lr {rate:.2e}  {now - before:.2f} s"
    sys.stdout.write(f"step {step}/{config.steps}  {figures}\n")
    sys.stdout.flush()
