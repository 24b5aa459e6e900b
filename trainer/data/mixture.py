"""Mixture of several corpora: shares, and an order computed from seed and position.

    mixture = Mixture(parts={"web": web, "code": code}, weights=(0.8, 0.2))
    order = MixtureOrder(mixture.pass_lengths([800, 100]), [800, 100])
    parts, numbers = order.samples(np.arange(16), seed=0)     # corpus and sequence of the first 16 positions

A pass over the mixture has a fixed number of sequences of each corpus, in a random order that differs between passes:

1. With `epochs`: epochs x the corpus's number of sequences. With a whole number of epochs, each sequence occurs exactly
   that often per pass.
2. With `weights`: the corpus's share of the total number of sequences, rounded to one sequence.
3. Otherwise a pass contains each sequence of the corpus once.

Draws from a corpus continue across passes: no sequence is repeated before the whole corpus has been drawn. No state is
kept between calls, so every position takes the same time to compute, and skipping only means a higher position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.data.permutation import permute

__all__ = ["Mixture", "MixtureOrder", "TokenSource"]

_Array = np.ndarray[Any, Any]


class TokenSource(Protocol):
    """Tokens by position."""

    @property
    def digest(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    def read(self, start: int, count: int) -> _Array: ...

    def locate(self, position: int) -> tuple[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Corpora by name. At most one of `weights` and `epochs` is given; it has one number per corpus."""

    parts: dict[str, TokenSource]
    weights: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        described = repr(([part.digest for part in self.parts.values()], self.weights, self.epochs))
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    def pass_lengths(self, num_sequences: Sequence[int]) -> list[int]:
        """Number of sequences of each corpus in one pass."""
        if self.epochs:
            return [round(epochs * number) for epochs, number in zip(self.epochs, num_sequences, strict=True)]
        if not self.weights:
            return list(num_sequences)
        total, whole = sum(num_sequences), sum(self.weights)
        exact = [weight / whole * total for weight in self.weights]
        lengths = [int(length) for length in exact]
        # Largest remainders first; if remainders are equal, the first corpus.
        order = sorted(range(len(exact)), key=lambda part: lengths[part] - exact[part])
        for part in order[: total - sum(lengths)]:
            lengths[part] += 1
        return lengths


class MixtureOrder:
    """Order of a mixture: maps a position of the training to a corpus and a sequence of it."""

    def __init__(self, pass_lengths: Sequence[int], num_sequences: Sequence[int]) -> None:
        self._lengths = np.array(pass_lengths, dtype=np.int64)
        self._sizes = np.array(num_sequences, dtype=np.int64)
        self._ends = np.cumsum(self._lengths)
        self.pass_length = int(self._ends[-1])

    def samples(self, positions: _Array, seed: int) -> tuple[_Array, _Array]:
        """Return the corpus, and the sequence within it, for positions of any shape."""
        passes, within = np.divmod(positions, self.pass_length)
        places = np.empty_like(within)
        for number in np.unique(passes):
            chosen = passes == number
            places[chosen] = permute(within[chosen], self.pass_length, key=(seed, int(number)))
        parts = np.searchsorted(self._ends, places, side="right")
        draws = passes * self._lengths[parts] + places - (self._ends - self._lengths)[parts]
        epochs, order = np.divmod(draws, self._sizes[parts])
        numbers = np.empty_like(order)
        for part, epoch in {(int(part), int(epoch)) for part, epoch in zip(parts.flat, epochs.flat, strict=True)}:
            chosen = (parts == part) & (epochs == epoch)
            numbers[chosen] = permute(order[chosen], int(self._sizes[part]), key=(seed, epoch, part + 1))
        return parts, numbers
