"""How far a training is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a training is. The two numbers part when a batch is skipped."""

    step: int = 0
    """Optimizer steps taken."""
    batch_index: int = 0
    """The batch to train on next."""
