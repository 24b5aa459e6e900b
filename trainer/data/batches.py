"""Batches as a pure function of their number: nothing to save, nothing to replay, skipping is counting.

    stream = BatchStream(corpus, seq_len=256, global_batch_size=16, seed=0, validation_ratio=0.05)
    batch = stream.batch(40, data_rank=1, data_size=4)      # rows 4..7 of global batch 40
    batch.inputs, batch.targets                             # (4, 256) int64 each, targets one token ahead
    batch.sample_ids                                        # (4,) which sequences of the split these are

The rows of data rank r are a slice of one global batch that no layout changes, so every layout trains on the same
sequences in the same order. Sequences are cut from the split without overlap; each epoch visits all of them once in
a new order, worked out for some batches at once: it takes a hundred small array operations whatever their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.load import ConfigError
from trainer.data.corpus import Corpus
from trainer.data.permutation import permute

__all__ = ["Batch", "BatchStream"]

MAX_ROWS_AHEAD = 512
"""Sequences of a rank whose order is worked out at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One data rank's share of a global batch."""

    index: int
    inputs: Tensor  # (rows, seq_len) int64
    targets: Tensor  # (rows, seq_len) int64
    sample_ids: tuple[int, ...]  # sequence number within the split, one a row

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (CUDA only); torch's DataLoader calls this method."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def piece(self, number: int, count: int) -> Batch:
        """A part of every row, of `count` equal ones."""
        if count == 1:
            return self
        size = self.inputs.shape[1] // count
        part = slice(number * size, (number + 1) * size)
        return replace(self, inputs=self.inputs[:, part].contiguous(), targets=self.targets[:, part].contiguous())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; asynchronous from pinned memory."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


class BatchStream:
    """Numbered global batches of one split (`train` or `validation`) of a corpus."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        validation_ratio: float,
        split: str = "train",
    ) -> None:
        self.corpus = corpus
        self._tokens: np.ndarray[Any, Any] = corpus.tokens.view(np.ndarray)  # a memmap's slices cost ten times more
        self._ahead: dict[tuple[int, int, int], np.ndarray[Any, Any]] = {}
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.split = split
        total = len(corpus.tokens)
        boundary = total - int(total * validation_ratio)
        self.first_token, last = (0, boundary) if split == "train" else (boundary, total)
        # The last token of a sequence is predicted, not read: each needs one more than its length.
        self.num_sequences = max(0, last - self.first_token - 1) // seq_len
        if not self.num_sequences:
            raise ConfigError(
                f"data.seq_len = {seq_len}: the {split} split has {last - self.first_token} tokens, "
                f"fewer than one sequence of {seq_len + 1}"
            )

    def sample_ids(self, batch_index: int, data_rank: int = 0, data_size: int = 1) -> tuple[int, ...]:
        """Sequences of the rank's rows of a batch; by default all rows of the global batch."""
        rows = self.global_batch_size // data_size
        batches = max(1, MAX_ROWS_AHEAD // rows)
        key = (batch_index // batches, data_rank, data_size)
        if key not in self._ahead:
            firsts = (key[0] * batches + np.arange(batches)) * self.global_batch_size + data_rank * rows
            self._ahead = {key: self._samples_at(firsts[:, None] + np.arange(rows))}
        return tuple(self._ahead[key][batch_index % batches].tolist())

    def _samples_at(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sequences at these positions of the whole training, counted in sequences; any shape."""
        if self.split != "train":
            return positions % self.num_sequences
        epochs, within = np.divmod(positions, self.num_sequences)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = permute(within[chosen], self.num_sequences, key=(self.seed, int(epoch)))
        return ids

    def batch(self, batch_index: int, data_rank: int = 0, data_size: int = 1) -> Batch:
        """The rank's rows of global batch `batch_index` (from 0; there is no last one)."""
        ids = self.sample_ids(batch_index, data_rank, data_size)
        rows: np.ndarray[Any, Any] = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, number in enumerate(ids):
            start = self.token_position(number)
            rows[row] = self._tokens[start : start + self.seq_len + 1]
        tokens = torch.from_numpy(rows)
        return Batch(
            index=batch_index, inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), sample_ids=ids
        )

    def token_position(self, sample_id: int) -> int:
        """Start of a sequence in the corpus; `corpus.locate` names the file."""
        return self.first_token + sample_id * self.seq_len
