"""A few of many: the same number of pieces apart, so that no part of a run is left out.

evenly([1, 2, 3, 4, 5, 6], 3)      # [2, 4, 6]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["evenly"]

_T = TypeVar("_T")


def evenly(items: Sequence[_T], most: int) -> list[_T]:
    """At most so many of them in their order, the last one included."""
    few = min(len(items), most)
    return [items[i * len(items) // few - 1] for i in range(1, few + 1)]
