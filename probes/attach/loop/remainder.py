"""Passes at the end of an epoch that are too few for an update.

    remainder.backward_ended(leader)
    remainder.epoch_ended()
    remainder.is_left               # passes without an update came before the epoch's end
    remainder.is_cleared()          # at the next training pass: the loop has dropped their gradients
    remainder.updated()

A loop that accumulates gradients over a fixed number of batches may clear them at the start of an epoch (YOLOv5, MAE).
The passes that were left are then part of no update, so their losses do not belong to the next step. At the end of the
training they are no step. Gradients that are cleared within an epoch are different: sharpness-aware minimization and
gradient surgery do so between passes that all count.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

__all__ = ["Remainder"]


class Remainder:
    """The passes since the newest update."""

    def __init__(self) -> None:
        self._given: tuple[ref[Tensor], int] | None = None  # a parameter, and its gradient's version after the pass
        self.is_left = False

    def backward_ended(self, leader: Any) -> None:
        """Note a backward pass that gives gradients to parameters of this optimizer."""
        self.updated()
        for group in getattr(leader, "param_groups", ()):
            for parameter in group.get("params", ()):
                if isinstance(parameter, Tensor) and parameter.is_leaf and parameter.grad is not None:
                    self._given = ref(parameter), parameter.grad._version
                    return

    def updated(self) -> None:
        """Note an update by any optimizer."""
        self._given, self.is_left = None, False

    def epoch_ended(self) -> None:
        """Note that a data loader is at its end."""
        self.is_left = self._given is not None

    def is_cleared(self) -> bool:
        """Return True, once, if passes were left and their gradients have been cleared or zeroed since then."""
        parameter = self._given[0]() if self._given is not None and self.is_left else None
        if parameter is None or self._given is None:
            return False
        cleared = parameter.grad is None or parameter.grad._version != self._given[1]
        if cleared:
            self.updated()
        return cleared
