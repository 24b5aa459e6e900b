"""Replay a refused step (whose update was not applied), to see whether the fault recurs.

    triage = Triage(training, recorder, gradients, limit=8)
    replayed = triage.repeat(verdict, batch)                # before the rollback: same state, same batch
    triage.from_restored(replayed, batch, state_step=30)    # after the rollback: same batch, older state

Recomputation is deterministic. So a NaN that does not recur was caused by a device, its memory or a race. A NaN that
recurs was caused by data or numerics (or a device with a permanent fault). The older state separates data from
numerics: if the NaN recurs on that state, too, the batch is the cause, otherwise the weights of the refused step. Each
replay is one forward and backward pass of all ranks, with every operation watched (`trainer.replay.origin`). The
gradients of the replay are dropped.

A replay changes no parameter, optimizer state, position or data loader, and restores the random generators. Replays are
collective, so every decision here depends only on numbers that all ranks share.

Each rank records its result in an event `replay`; `analyzers.numerics.replay_result` combines them.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from probes.fail_open import failing_open
from probes.guard.decisions import Verdict
from probes.recorder import NullRecorder, Recorder
from probes.tape import event_kinds
from trainer.checkpoint.state import restore_rng, rng_state
from trainer.data.batches import Batch
from trainer.model.compiling import uncompiled
from trainer.replay.origin import Origin, OriginWatch
from trainer.replay.samples import SampleLosses, describe, differing_rows
from trainer.training.rank_training import Training

__all__ = ["GradientExaminer", "Replay", "Triage", "findings", "is_reproduced", "replay"]

MAX_SAMPLES = 8
"""Maximum number of samples that each rank reports, the worst first."""


class GradientExaminer(Protocol):
    """Checks this rank's gradients; implemented in `probes.gradients`."""

    def examine(self, step: int) -> list[tuple[str, int]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of one replay. `loss` and `grad_norm` are the same on all ranks, the other fields are this rank's own."""

    loss: float
    grad_norm: float
    local_loss: float | None
    origin: Origin | None
    sample_losses: dict[int, float]
    """Loss by row of the rank's share of the batch."""
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A step that was refused and has been repeated."""

    verdict: Verdict
    came_back: bool
    duration_s: float


class Triage:
    """Replays refused steps. Every method is collective."""

    def __init__(
        self, training: Training, recorder: Recorder, gradients: GradientExaminer | None, *, limit: int
    ) -> None:
        self.training = training
        self.recorder = recorder
        self.gradients = gradients
        self.remaining = limit
        """Number of refused steps that may still be replayed. It is limited so that a run that keeps failing does not
        take twice as long.
        """

    def repeat(self, verdict: Verdict, batch: Batch) -> Refused | None:
        """Replay the refused step on the same state; returns None if it is not replayed. When this is called, the state
        must be the one before the step, and the gradients dropped."""
        if self.remaining <= 0 or verdict.kind not in ("non_finite", "spike"):
            return None
        self.remaining -= 1
        replayed = self._replay(verdict, batch)
        came_back = is_reproduced(verdict, replayed)
        self._report("same", verdict.step - 1, verdict, batch, replayed, came_back)
        return Refused(verdict=verdict, came_back=came_back, duration_s=replayed.duration_s)

    def from_restored(self, refused: Refused | None, batch: Batch, *, state_step: int) -> None:
        """Replay the batch on the restored state, if the fault recurred and the restored state is older."""
        if refused is None or not refused.came_back or state_step >= refused.verdict.step - 1:
            return
        replayed = self._replay(refused.verdict, batch)
        self._report("restored", state_step, refused.verdict, batch, replayed, is_reproduced(refused.verdict, replayed))

    def _replay(self, verdict: Verdict, batch: Batch) -> Replay:
        with self.recorder.span("replay"):
            wants_layers = verdict.kind == "spike" and self.gradients is not None
            return replay(self.training, batch, self.gradients if wants_layers else None, verdict.step)

    def _report(
        self, state: Literal["same", "restored"], state_step: int, verdict: Verdict, batch: Batch, replayed: Replay,
        came_back: bool,
    ) -> None:  # fmt: skip
        with failing_open("replay"):
            self.recorder.event(
                event_kinds.REPLAY,
                step=verdict.step,
                verdict=verdict.kind,
                state=state,
                state_step=state_step,
                batch_index=batch.index,
                came_back=came_back,
                loss=replayed.loss,
                loss_refused=verdict.loss,
                loss_level=verdict.loss_level,
                grad_norm=replayed.grad_norm,
                local_loss=replayed.local_loss,
                **findings(self.training, batch, replayed),
            )


def findings(training: Training, batch: Batch, replayed: Replay) -> dict[str, Any]:
    """Results of this rank, as the keys of an event."""
    origin = None
    if replayed.origin is not None:
        rows = _rows(training, replayed.origin)
        origin = replayed.origin.to_json() | {"samples": [batch.sample_ids[row] for row in rows]}
    return {
        "origin": origin,
        "samples": describe(training, batch, replayed.sample_losses, most=MAX_SAMPLES),
        "num_samples": len(batch.sample_ids),
        "data_rank": training.data_rank,
        "changed_samples": differing_rows(training, batch),
        "duration_s": replayed.duration_s,
    }


def replay(training: Training, batch: Batch, gradients: GradientExaminer | None, step: int) -> Replay:
    """Run one watched forward and backward pass of all ranks, without side effects. Collective."""
    start = time.monotonic()
    generators = rng_state(training.device)
    # The phases of the replay must not be recorded as phases of the step.
    recorder, training.recorder = training.recorder, NullRecorder()
    try:
        with (
            training.without_side_effects(),
            uncompiled() if training.modules[0].compiled else contextlib.nullcontext(),
            SampleLosses(training, batch) as losses,
            OriginWatch(training.modules) as watch,
        ):
            own = training.forward_backward(batch).double().view(1)
        if gradients is not None:
            gradients.examine(step)
        share = own / training.plan.loss_copies if training.has_loss else torch.zeros_like(own)
        clipped = training.clip(share, own=(own,))
    finally:
        training.recorder = recorder
        restore_rng(generators, training.device)
    training.drop_gradients()
    return Replay(
        loss=clipped.sums[0],
        grad_norm=clipped.norm,
        local_loss=clipped.own[0] if training.has_loss else None,
        origin=watch.origin,
        sample_losses=losses.by_row,
        duration_s=time.monotonic() - start,
    )


def is_reproduced(verdict: Verdict, replayed: Replay) -> bool:
    """True if the replay is not finite, or after a spike, if its loss is nearer to the refused loss than to the earlier
    level."""
    if not (math.isfinite(replayed.loss) and math.isfinite(replayed.grad_norm)):
        return True
    if verdict.kind != "spike":
        return False
    if not (math.isfinite(verdict.loss) and math.isfinite(verdict.loss_level)):
        return True  # no earlier level to compare with, so assume that the replay reproduced the loss
    return replayed.loss >= 0.5 * (verdict.loss + verdict.loss_level)


def _rows(training: Training, origin: Origin) -> list[int]:
    """Map the bad rows of an operation's output to rows of the rank's share of the batch; [] if unknown.

    An output has one row per sequence of the microbatch, or one row per token (under sequence parallelism, only for
    this rank's part of the tokens).
    """
    size = training.plan.micro_batch_size
    seq = training.config.data.seq_len // training.plan.cp
    per_row = origin.num_rows // size
    if not per_row or origin.num_rows % size or per_row not in (1, seq, max(1, seq // training.plan.tp)):
        return []
    first = origin.microbatch * size
    return sorted({first + row // per_row for row in origin.bad_rows})
