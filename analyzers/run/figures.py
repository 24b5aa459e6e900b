"""Figures of missing records: none, there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["FIGURES"]

FIGURES: Mapping[str, Sequence[Callable[..., Iterator[Any]]]] = {}
