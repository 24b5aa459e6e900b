"""Batches as a pure function of their number: there is no state to save or replay, and a batch is skipped by adding one
to the number.

    stream = BatchStream(corpus, seq_len=256, global_batch_size=16, seed=0, validation_ratio=0.05)   # or a Mixture
    batch = stream.batch(40, data_rank=1, data_size=4)      # rows 4..7 of global batch 40
    batch.inputs, batch.targets                             # (4, 256) int64 each, targets one token ahead
    batch.sample_ids                                        # (4,) which sequences of the split these are

The rows of data rank r are a slice of a global batch that does not depend on the layout, so every layout trains on the
same sequences in the same order. Sequences are cut from the split without overlap; each epoch visits all of them once,
in a new order. The order is computed for several batches at once, because it takes a hundred small array operations for
any number of batches. A mixture numbers the sequences of its corpora consecutively, and `trainer.data.mixture` computes
their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.load import ConfigError
from trainer.data.mixture import Mixture, MixtureOrder, TokenSource
from trainer.data.permutation import permute

__all__ = ["Batch", "BatchStream"]

MAX_ROWS_AHEAD = 512
"""The order is computed for this many of a rank's sequences at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One data rank's share of a global batch."""

    index: int
    inputs: Tensor  # (rows, seq_len) int64
    targets: Tensor  # (rows, seq_len) int64
    sample_ids: tuple[int, ...]  # sequence number within the split, one per row

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (CUDA only); torch's DataLoader calls this method."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def select_chunks(self, chunks: tuple[int, ...], count: int) -> Batch:
        """Split every row into `count` equal chunks, and return a batch with only the chunks at the indices `chunks`,
        concatenated."""
        if len(chunks) == count:
            return self
        inputs, targets = (rows.reshape(len(rows), count, -1)[:, chunks] for rows in (self.inputs, self.targets))
        return replace(self, inputs=inputs.flatten(1), targets=targets.flatten(1))

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; asynchronous from pinned memory."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Sequences of one corpus."""

    source: TokenSource
    first_token: int
    num_sequences: int


class BatchStream:
    """Numbered global batches of one split (`train` or `validation`) of a corpus or a mixture."""

    def __init__(
        self,
        corpus: TokenSource | Mixture,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        validation_ratio: float,
        split: str = "train",
    ) -> None:
        self.corpus = corpus
        self._ahead: dict[tuple[int, int, int], np.ndarray[Any, Any]] = {}
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.split = split
        named = corpus.parts if isinstance(corpus, Mixture) else {"": corpus}
        self._parts = [self._part(name, source, validation_ratio) for name, source in named.items()]
        sizes = [part.num_sequences for part in self._parts]
        self._first_ids = np.cumsum([0, *sizes[:-1]])
        self.num_sequences = sum(sizes)
        self._order: MixtureOrder | None = None
        if isinstance(corpus, Mixture):
            lengths = corpus.pass_lengths(sizes)
            if not sum(lengths):
                raise ConfigError(f"data.epochs = {list(corpus.epochs)}: is less than one sequence in every folder")
            self._order = MixtureOrder(lengths, sizes)

    def _part(self, name: str, source: TokenSource, validation_ratio: float) -> _Part:
        total = source.num_tokens
        boundary = total - int(total * validation_ratio)
        first, last = (0, boundary) if self.split == "train" else (boundary, total)
        # A sequence needs one more token than its length, because its last token is only predicted.
        num_sequences = max(0, last - first - 1) // self.seq_len
        if not num_sequences:
            raise ConfigError(
                f"data.seq_len = {self.seq_len}: the {self.split} split{f' of {name}' if name else ''} has "
                f"{last - first} tokens, fewer than one sequence of {self.seq_len + 1}"
            )
        return _Part(source=source, first_token=first, num_sequences=num_sequences)

    def sample_ids(self, batch_index: int, data_rank: int = 0, data_size: int = 1) -> tuple[int, ...]:
        """Numbers of the sequences in a rank's rows of a batch. By default, the numbers in all rows of the global
        batch."""
        rows = self.global_batch_size // data_size
        batches = max(1, MAX_ROWS_AHEAD // rows)
        key = (batch_index // batches, data_rank, data_size)
        if key not in self._ahead:
            firsts = (key[0] * batches + np.arange(batches)) * self.global_batch_size + data_rank * rows
            self._ahead = {key: self._samples_at(firsts[:, None] + np.arange(rows))}
        return tuple(self._ahead[key][batch_index % batches].tolist())

    def _samples_at(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers of the sequences at these positions of the training. A position counts the sequences before it;
        `positions` may have any shape."""
        if self.split != "train":
            return positions % self.num_sequences
        if self._order is not None:
            parts, numbers = self._order.samples(positions, self.seed)
            return self._first_ids[parts] + numbers
        epochs, within = np.divmod(positions, self.num_sequences)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = permute(within[chosen], self.num_sequences, key=(self.seed, int(epoch)))
        return ids

    def batch(self, batch_index: int, data_rank: int = 0, data_size: int = 1) -> Batch:
        """The rank's rows of global batch `batch_index`, which starts at 0 and has no upper limit."""
        ids = self.sample_ids(batch_index, data_rank, data_size)
        rows: np.ndarray[Any, Any] = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, number in enumerate(ids):
            part, start = self._place(number)
            rows[row] = part.source.read(start, self.seq_len + 1)
        tokens = torch.from_numpy(rows)
        return Batch(
            index=batch_index, inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), sample_ids=ids
        )

    def _place(self, sample_id: int) -> tuple[_Part, int]:
        """Corpus of a sequence, and the position of its first token."""
        number = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        part = self._parts[number]
        return part, part.first_token + (sample_id - int(self._first_ids[number])) * self.seq_len

    def locate(self, sample_id: int) -> tuple[str, int]:
        """The file (or source and document) in which a sequence begins, and the position of the sequence's first token
        in it."""
        part, start = self._place(sample_id)
        return part.source.locate(start)
