"""A random permutation of n numbers that is computed instead of stored: `permute(i, n, key)` for any i in any order.

A Feistel network on 2k bits is a permutation whatever its round function is. A result of n or more is sent through the
network again until the result is below n ("cycle walking"), so the whole is a permutation of 0..n-1. A batch far into
the run costs as much as the first one, and a checkpoint needs to store nothing about the order.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["permute"]

_ROUNDS = 6
_Array = np.ndarray[Any, np.dtype[Any]]


def permute(positions: _Array, count: int, key: tuple[int, ...]) -> _Array:
    """Map `positions` (each in 0..count-1) by the permutation for `key`, for example (seed, epoch)."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    out = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        out[outside] = _feistel(out[outside], half, keys)
        outside = out >= count
    return out.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> list[np.uint64]:
    sequence = np.random.SeedSequence(list(key))
    return [np.uint64(value) for value in sequence.generate_state(_ROUNDS, dtype=np.uint64)]


def _feistel(values: _Array, half: int, keys: list[np.uint64]) -> _Array:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(values: _Array) -> _Array:
    """splitmix64's finaliser; wraps around on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Array = values ^ (values >> np.uint64(31))
    return mixed
