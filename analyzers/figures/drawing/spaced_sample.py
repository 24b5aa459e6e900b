"""Evenly spaced samples of a sequence.

spaced_sample([1, 2, 3, 4, 5, 6], 3)      # [1, 3, 6]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["spaced_sample"]

_T = TypeVar("_T")


def spaced_sample(items: Sequence[_T], most: int) -> list[_T]:
    """At most `most` items in order, including the first and the last; with `most` = 1 only the last."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[-1:]) if most == 1 else []
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
