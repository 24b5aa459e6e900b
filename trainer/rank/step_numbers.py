"""The numbers that a step's verdict needs. They come from one small reduction, besides the reduction of the gradients.

numbers = reduce_numbers(training, votes, local_loss, own_square)     # on the device
result = numbers.read()                                               # a StepResult; waits for the device
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.guard.votes import StepVotes
from trainer.training.clipping import ClipNumbers, ClipResult
from trainer.training.rank_training import Training

__all__ = ["StepNumbers", "StepResult", "reduce_numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The numbers of one step. `own_loss` and `own_norm` are the loss and norm of this rank alone (NaN if it has none).
    The others are the same on all ranks."""

    loss: float
    norm: float
    votes: StepVotes
    own_loss: float
    own_norm: float
    """Norm of this rank's gradient before reduction; NaN in most steps, because it is measured only in some."""
    compression_error: float | None = None
    """Error of the reduced gradient relative to the uncompressed one; None if not measured."""

    def own_columns(self, *, has_loss: bool) -> dict[str, float]:
        """Columns of `steps` that hold this rank's own numbers."""
        own = {"local_loss": self.own_loss} if has_loss else {}
        if math.isfinite(self.own_norm):
            own["local_grad_norm"] = self.own_norm
        if self.compression_error is not None:
            own["compression_error"] = self.compression_error
        return own


@dataclass(slots=True, kw_only=True)
class StepNumbers:
    """The numbers of a step, still on the device."""

    clipped: ClipNumbers
    has_loss: bool
    has_compression: bool
    scale: float
    """Loss scale in fp16, otherwise 1."""

    @property
    def norm(self) -> Tensor:
        return self.clipped.row[0]

    @property
    def loss(self) -> Tensor:
        return self.clipped.row[1]

    def read(self) -> StepResult:
        """Copy the numbers to the host; waits for the device."""
        return self.to_result(self.clipped.read())

    def to_result(self, clipped: ClipResult) -> StepResult:
        """Make the result from numbers on the host."""
        loss, *sums = clipped.sums
        own_loss, own_square, *more = clipped.own
        error = None
        if self.has_compression:
            squared_error, square = more[:2]
            error = math.sqrt(squared_error / square) if square > 0 else math.nan
        return StepResult(
            loss=loss,
            norm=clipped.norm,
            votes=StepVotes.from_row(sums),
            own_loss=own_loss if self.has_loss else math.nan,
            own_norm=math.sqrt(own_square) / self.scale,
            compression_error=error,
        )


def reduce_numbers(
    training: Training, votes: StepVotes, local_loss: Tensor, own_square: Tensor | None, *, waits: bool = False
) -> StepNumbers:
    """Clip the gradients, and reduce loss, norm and votes. Collective. `waits`: wait until the numbers are on the
    host."""
    own = local_loss.double().view(1)
    # Tensor-parallel ranks each add the same loss; pipeline ranks without a loss add zero.
    share = own / training.plan.loss_copies if training.has_loss else torch.zeros_like(own)
    row = torch.tensor(votes.to_row(), dtype=torch.float64).to(own.device, non_blocking=True)
    square = own.new_full((1,), math.nan) if own_square is None else own_square
    squares = training.compression_squares()
    own_numbers = (own, square) if squares is None else (own, square, squares)
    clipped = training.clip_unread(share, row, own=own_numbers, waits=waits)
    return StepNumbers(
        clipped=clipped,
        has_loss=training.has_loss,
        has_compression=squares is not None,
        scale=training.scaler.scale if training.scaler is not None else 1.0,
    )
