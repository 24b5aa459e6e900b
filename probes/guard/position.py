"""Position of a training: step and batch index."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Steps taken and batches used. They differ once a batch has been skipped."""

    step: int = 0
    """Optimizer steps taken."""
    batch_index: int = 0
    """The batch to train on next."""
