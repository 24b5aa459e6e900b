"""The loss of each sequence in the batch of a replayed step, and a description of the sequences.

    with SampleLosses(training, batch) as losses:
        training.forward_backward(batch)
    losses.by_row                        # {row: nats per token} for the rows whose logits this rank has seen
    describe(training, batch, losses.by_row, most=8)      # [{"id": 812, "loss": 5.6, "file": ..., "text": ...}, ...]

Training computes only the mean loss. Here a hook on the output layer computes the loss of each row from the logits, row
by row, so that it needs memory for one row only. The chunked loss provides the loss of each token itself. With tensor
parallelism, all ranks of a group must take part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.data.batches import Batch
from trainer.replay.operations import in_backward
from trainer.torch_compat import disable_current_modes
from trainer.training.rank_training import Training

__all__ = ["SampleLosses", "describe", "differing_rows"]

EXCERPT_CHARACTERS = 160
_TEXT_VOCABULARY = 256
"""Vocabulary size at which tokens are bytes of text."""


class SampleLosses:
    """Collects the losses during one pass. Empty on pipeline ranks without the output layer."""

    def __init__(self, training: Training, batch: Batch) -> None:
        self.by_row: dict[int, float] = {}
        self._targets = batch.targets
        self._size = training.plan.micro_batch_size
        self._microbatch = 0
        heads = [part.head for part in training.modules if part.head is not None]
        self._head = heads[-1] if heads else None
        self._output_loss = training.modules[-1].output_loss
        self._handle: Any = None

    def __enter__(self) -> SampleLosses:
        if self._head is not None:
            self._handle = self._head.register_forward_hook(self._after)
        self._output_loss.reader = self._read_token_losses
        return self

    def __exit__(self, *error: Any) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._output_loss.reader = None

    def _read_token_losses(self, losses: Tensor) -> None:
        first = self._microbatch * self._size
        self._microbatch += 1
        with disable_current_modes():
            self.by_row |= {first + place: loss for place, loss in enumerate(losses.mean(1).tolist())}

    def _after(self, module: nn.Module, args: Any, logits: Tensor) -> None:
        if in_backward():  # ignore the recomputation in backward
            return
        first = self._microbatch * self._size
        self._microbatch += 1
        with disable_current_modes(), torch.no_grad():
            for place in range(logits.shape[0]):
                row = logits.detach()[place]
                full = row.full_tensor() if isinstance(row, DTensor) else row
                loss = F.cross_entropy(full.float(), self._targets[first + place])
                self.by_row[first + place] = loss.item()


def describe(training: Training, batch: Batch, losses: Mapping[int, float], *, most: int) -> list[dict[str, Any]]:
    """Describe the rows with the highest loss, non-finite ones first: id, loss, file, position in the file, start of
    the text.

    The text is decoded from the batch, so it is what was trained on; there is none if tokens are not bytes.
    """
    order = sorted(losses, key=lambda row: (math.isfinite(losses[row]), -losses[row] if losses[row] > 0 else 0.0))
    found = []
    for row in order[:most]:
        number = batch.sample_ids[row]
        name, place = training.stream.locate(number)
        described: dict[str, Any] = {"id": number, "row": row, "loss": losses[row]}
        if name:
            described |= {"file": name, "byte": place}
        if training.config.model.vocab_size == _TEXT_VOCABULARY:
            described["text"] = excerpt(batch.inputs[row])
        found.append(described)
    return found


def excerpt(tokens: Tensor) -> str:
    """The first bytes of a sequence as text; invalid bytes are shown as such."""
    values = tokens[:EXCERPT_CHARACTERS].tolist()
    return bytes(value & 0xFF for value in values).decode("utf-8", errors="replace")


def differing_rows(training: Training, batch: Batch) -> list[int]:
    """Sample IDs of the rows that differ from the data set when it is read again. These rows were corrupted after they
    were read."""
    reread = training.own_piece(training.stream.batch(batch.index, training.data_rank, training.plan.data_size))
    if reread.sample_ids != batch.sample_ids:
        return list(batch.sample_ids)
    same = (reread.inputs == batch.inputs.cpu()).all(1) & (reread.targets == batch.targets.cpu()).all(1)
    return [number for number, equal in zip(batch.sample_ids, same.tolist(), strict=True) if not equal]
