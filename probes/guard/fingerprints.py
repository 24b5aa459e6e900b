"""Fingerprints: a 64-bit checksum of the bits of each tensor, to detect unintended changes.

    reader = FingerprintReader()
    reading = reader.read({"head.weight": parameter, ...})     # queued; waits for nothing
    reading.values()                                           # {"head.weight": 4207849484211234, ...}

A fingerprint is the sum of the tensor's 64-bit words, each multiplied by an odd number that depends on its position,
modulo 2^64. A flipped bit changes a word by a power of two, and a power of two below 2^64 times an odd number is never
0 modulo 2^64: a single flip is always seen. Other damage is missed with a probability of about 2^-64, unless it adds
and subtracts the same value at positions a multiple of 1024 words apart. It protects against accidents, not forgery.

Integer addition is associative: the same bits give the same value on every device and with any number of threads. On a
GPU the result is copied asynchronously, and has usually arrived when `values` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..step_scalars import read_back

__all__ = ["FingerprintReader", "Reading"]

PERIOD = 1024
"""Number of positions with distinct weights; rows of this many words are summed at the speed of memory."""
CHUNK = 64 * PERIOD
"""Words of one product on a CPU: with their weights they stay in its cache."""
SMALL_WORDS = 1 << 13
"""Tensors up to this size are read together on a GPU, where calls cost more than bytes."""


_WeightedChunk = tuple[Tensor, Tensor]


class Reading:
    """Fingerprints on their way from the device."""

    def __init__(self, names: list[str], parts: list[tuple[list[int], Tensor]]) -> None:
        self._names = names
        self._parts = [
            (indices, *(read_back(values) if values.is_cuda else (values, None))) for indices, values in parts
        ]

    def values(self) -> dict[str, int]:
        """Signed 64-bit values by name, in the order of the tensors. Waits for the device if they are not there yet."""
        found = [0] * len(self._names)
        for indices, values, arrived in self._parts:
            if arrived is not None:
                arrived.synchronize()
            for index, value in zip(indices, values.tolist(), strict=True):
                found[index] = value
        return dict(zip(self._names, found, strict=True))


class FingerprintReader:
    """Reads the same tensors repeatedly. Caches views of the tensors' memory, because creating these views would take
    half of the time."""

    def __init__(self) -> None:
        self._views: dict[str, tuple[int, int, Tensor, list[_WeightedChunk]]] = {}

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> Reading:
        """Start to fingerprint plain tensors (of a DTensor: its local part) of any type, device and shape."""
        single: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        small: dict[torch.device, list[tuple[int, Tensor]]] = {}
        whole: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, (name, tensor) in enumerate(tensors.items()):
            count = tensor.numel()
            if count == 1:
                single.setdefault((tensor.device, tensor.dtype), []).append((index, tensor))
            elif count:
                words, pieces = self._words(name, tensor)
                if pieces:
                    whole.setdefault(tensor.device, []).append((index, _product(pieces)))
                elif len(words) <= SMALL_WORDS:
                    small.setdefault(words.device, []).append((index, words))
                else:
                    whole.setdefault(words.device, []).append((index, _column_sums(words)))
        parts = [(_indices(found), _of_scalars([value for _, value in found])) for found in single.values()]
        parts += [(_indices(found), _together([words for _, words in found])) for found in small.values()]
        parts += [(_indices(found), torch.stack([value for _, value in found])) for found in whole.values()]
        return Reading(list(tensors), parts)

    def _words(self, name: str, tensor: Tensor) -> tuple[Tensor, list[_WeightedChunk]]:
        """A tensor's words. On a CPU they are also split into pieces, and each piece is paired with its weights."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        known = self._views.get(name)
        if known is not None and known[:2] == (address, nbytes):
            return known[2:]
        words = _words(tensor)
        pieces = [] if words.is_cuda else _pieces(words)
        # a view of the tensor's memory; a copy would become outdated
        if words.data_ptr() == address and words.nbytes == nbytes:
            self._views[name] = (address, nbytes, words, pieces)
        return words, pieces


def _indices(found: Sequence[tuple[int, Tensor]]) -> list[int]:
    return [index for index, _ in found]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's memory as 64-bit words, without a copy where that is possible; the end is filled up with zeros."""
    flat = tensor.detach().reshape(-1)
    missing = -flat.numel() % (8 // min(8, flat.itemsize))
    if missing:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    elif flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _pieces(words: Tensor) -> list[_WeightedChunk]:
    weights = _long_weights()
    return [(piece, weights[: len(piece)]) for piece in torch.split(words, CHUNK)]


def _product(pieces: list[_WeightedChunk]) -> Tensor:
    """On a CPU: one multiplication and addition per word."""
    total = torch.dot(*pieces[0])
    for piece, weights in pieces[1:]:
        total += torch.dot(piece, weights)
    return total


def _column_sums(words: Tensor) -> Tensor:
    """On a GPU, which has no integer matrix product: sum the words at each position, then weight the sums."""
    rows = len(words) // PERIOD
    weights = _weights(words.device)
    total = (words[: rows * PERIOD].view(rows, PERIOD).sum(0) * weights).sum()
    rest = words[rows * PERIOD :]
    return total + (rest * weights[: len(rest)]).sum()


def _together(vectors: Sequence[Tensor]) -> Tensor:
    """Sum many short vectors at once by one running sum, read where each vector ends. Overflow wraps around, which is
    harmless."""
    weights, ends = _layout(tuple(len(vector) for vector in vectors), vectors[0].device)
    running = torch.cumsum(torch.cat(list(vectors)) * weights, 0)[ends]
    return torch.diff(running, prepend=running.new_zeros(1))


def _of_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Tensors of one element, such as the optimizer's step counts: one word each."""
    column = torch.stack([scalar.detach().reshape(()) for scalar in scalars])
    table = column.new_zeros(len(scalars), 8 // min(8, column.itemsize))
    table[:, 0] = column
    words = table.view(torch.int64)
    return (words * _weights(words.device)[: words.shape[1]]).sum(1)


@lru_cache(maxsize=64)
def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    weights = _weights(torch.device("cpu"))
    ends = torch.tensor(sizes).cumsum(0) - 1
    repeated = torch.cat([weights.repeat(-(-size // PERIOD))[:size] for size in sizes])
    return repeated.to(device), ends.to(device)


@lru_cache(maxsize=1)
def _long_weights() -> Tensor:
    return _weights(torch.device("cpu")).repeat(CHUNK // PERIOD)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit numbers without a pattern, always the same: the output function of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        state = np.arange(1, PERIOD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
