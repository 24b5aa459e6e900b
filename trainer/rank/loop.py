"""The training loop of one rank.

    outcome = train(session)        # returns "finished" or "stopped"
    for position, stop in steps(session, position): ...         # the same, one step at a time

A step from top to bottom: batch, forward and backward, one small reduction (gradient norm, loss and the votes),
clipping, the guard's verdict, and then either the optimizer's step or a rollback. All ranks reach the same verdict,
because it depends only on reduced numbers. On a GPU the verdict comes one step late (`trainer.rank.late_verdict`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from probes.collectives.gradients.reduction_inputs import ReductionInputs
from probes.recorder import Recorder
from probes.tape import event_kinds
from trainer.checkpoint.state import Position
from trainer.data.batches import Batch
from trainer.guard.recovery import Recovery
from trainer.rank.late_verdict import LateVerdict
from trainer.rank.step_numbers import StepResult, reduce_numbers
from trainer.training.rank_training import Training

__all__ = ["Session", "train"]


class BackwardProbe(Protocol):
    """The methods of `probes.gradients.GradientProbe` and `probes.expert_load.ExpertProbe` that are used here."""

    def after_backward(self, step: int) -> object: ...


class UnreducedGradients(Protocol):
    """The methods of `probes.collectives.gradients.local_gradient.UnreducedNorm` that are used here."""

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
    """Norm of local gradients. None if a rank's gradients are not whole, or if their reductions look like other calls.
    """
    reduction_inputs: ReductionInputs | None = None
    """Checks whether gradients were finite before their reduction; None if they are reduced on the host."""
    late: LateVerdict | None = None
    """Judges a step one step late; None if each step is judged before its update."""
    asked_to_stop: Callable[[], bool] = lambda: False
    prints_progress: bool = False
    _printed_at: float = field(default_factory=time.monotonic)


def train(session: Session) -> str:
    """Train to the last step, or until all ranks have agreed to stop. Saves a checkpoint at the end in both cases."""
    position, stop = session.recovery.start(), False
    walk = steps(session, position)
    while (after := next(walk, None)) is not None:
        position, stop = after
    session.recovery.end(position)
    return "stopped" if stop else "finished"


def steps(session: Session, position: Position) -> Iterator[tuple[Position, bool]]:
    """Take a step at each `next`, beginning at `position`. Yields the new position, and whether a stop ended it."""
    stop = False
    while position.step < session.training.config.train.steps and not stop:
        with session.recorder.step(position.step + 1):
            position, stop = _step(session, position)
        yield position, stop


def _step(session: Session, position: Position) -> tuple[Position, bool]:
    """Take one step; returns the new position, which is earlier after a rollback."""
    training, recorder, recovery = session.training, session.recorder, session.recovery
    config, step, batch_index = training.config, position.step + 1, position.batch_index
    batch = training.batch(batch_index)
    recorder.log(batch_index=batch_index, tokens=batch.inputs.numel())

    sampled = config.probes.compression_interval if recorder.enabled else 0
    training.sample_compression(_is_due(step, sampled))
    unreduced = session.unreduced if _is_due(step, config.probes.local_norm_interval) else None
    if unreduced is not None:
        unreduced.begin(training.device)
    if session.reduction_inputs is not None:
        session.reduction_inputs.begin(step)
    local_loss = training.forward_backward(batch)
    own_square = unreduced.end() if unreduced is not None else None
    for probe in (session.gradients, session.experts):
        if probe is not None:
            probe.after_backward(step)
    if session.late is not None and session.late.is_pending:
        after, stop = _settle(session, session.late)
        if stop or after != position:
            training.discard()  # these gradients belong to a state that is no longer current, or are not needed
            recorder.log(committed=False)
            return after, stop
    votes = recovery.votes(stop=session.asked_to_stop())
    if session.late is not None and session.late.lags(step):
        numbers = reduce_numbers(training, votes, local_loss, own_square)
        return session.late.take(position, batch, numbers), False
    # In a healthy step this is the only place where the host waits for the device.
    numbers = reduce_numbers(training, votes, local_loss, own_square, waits=True)
    return _judge(session, position, batch, numbers.read())


def _judge(session: Session, position: Position, batch: Batch, result: StepResult) -> tuple[Position, bool]:
    """Judge a step before its update, and take or refuse it."""
    training, recorder, recovery = session.training, session.recorder, session.recovery
    step, batch_index, stop = position.step + 1, position.batch_index, result.votes.stop > 0
    recovery.apply_votes(result.votes)
    if recovery.recompute(position, batch_index):
        recorder.log(committed=False)  # loss and norm are not logged here, because those of the recomputation count
        return position, stop
    own = result.own_columns(has_loss=training.has_loss)
    recorder.log(loss=result.loss, grad_norm=result.norm, committed=False, **own)

    if training.absorb_overflow(result.norm):
        return Position(step=position.step, batch_index=recovery.ledger.next_batch(batch_index + 1)), stop
    judged = result if session.late is None else session.late.judged(result)
    verdict = recovery.guard.judge(step, judged.loss, judged.norm)
    if not verdict.healthy:
        own_loss = judged.own_loss if training.has_loss else None
        return recovery.refuse(verdict, position, batch, own_loss), stop

    rate = training.step(step - 1)
    recovery.integrity.after_step(step)
    recorder.log(lr=rate, committed=True)
    _print_progress(session, step, result, rate)
    position = recovery.taken(position, batch_index)
    _evaluate(session, step)
    return position, stop


def _settle(session: Session, late: LateVerdict) -> tuple[Position, bool]:
    """Finish the step of which the numbers have not been read yet. Returns the position after it, and True if a stop
    was requested.

    The step's verdict is healthy unless its update was left out, or state has changed outside the optimizer.
    """
    recovery, settled = session.recovery, late.settle()
    result, position, stop = settled.result, settled.position, settled.result.votes.stop > 0
    recovery.apply_votes(result.votes)
    if settled.is_left_out:
        return position, False  # this step must get a verdict before a stop
    verdict = recovery.guard.judge(settled.step, result.loss, result.norm)
    if not verdict.healthy:
        return recovery.refuse(verdict, position, settled.batch, result.own_loss), stop
    _print_progress(session, settled.step, result, settled.rate)
    return recovery.taken(position, position.batch_index), stop


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


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
        else:  # a single validation set has no name
            session.recorder.event(event_kinds.EVALUATION, loss=mean)
    if session.prints_progress:
        by_set = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name)
        mean = sum(losses.values()) / len(losses)
        sys.stdout.write(f"step {step}/{session.training.config.train.steps}  validation loss {mean:.4f}")
        sys.stdout.write(f"  ({by_set})\n" if by_set else "\n")
        sys.stdout.flush()


def _print_progress(session: Session, step: int, result: StepResult, rate: float) -> None:
    config = session.training.config.train
    if not session.prints_progress or (step % config.log_interval and step != config.steps):
        return
    now, before = time.monotonic(), session._printed_at
    session._printed_at = now
    figures = f"loss {result.loss:.4f}  grad_norm {result.norm:.3f}  lr {rate:.2e}  {now - before:.2f} s"
    sys.stdout.write(f"step {step}/{config.steps}  {figures}\n")
    sys.stdout.flush()
