"""Gradients that the loop clears instead of using them in an update.

    remainder.backward_ended(leader)
    remainder.epoch_ended()
    remainder.is_left               # passes without an update came before the end of an epoch
    remainder.is_cleared()          # at the next training pass, or at the fetch of its batch
    remainder.is_untouched(num_clips=1)    # at the update: its gradients are those that the newest pass has left
    remainder.updated()

A loop that accumulates gradients over a fixed number of batches may clear them at the start of an epoch (YOLOv5, MAE).
The passes that were left are then part of no update, so their losses do not belong to the next step. At the end of the
training they are no step. A loop may also clear gradients because they are NaN or Inf (ESPnet): it refuses that step.
Other gradients that are cleared may count: sharpness-aware minimization clears them once it has changed the weights,
and gradient surgery once it has copied them. They do not count if the weights are the same in the next pass, and the
update uses the gradients as the newest pass has left them: an epoch of a generator ended, or an attack on the inputs
needed only the gradients of these.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

__all__ = ["Remainder"]


class Remainder:
    """The gradients of the passes since the newest update."""

    def __init__(self) -> None:
        self._given: tuple[ref[Tensor], int] | None = None  # a parameter, and its gradient's version after the pass
        self._left = (0, 0)  # the parameter's version then, and the id of its gradient
        self.is_left = False

    def backward_ended(self, leader: Any) -> None:
        """Note a backward pass that gives gradients to parameters of this optimizer."""
        self.updated()
        for group in getattr(leader, "param_groups", ()):
            for parameter in group.get("params", ()):
                if isinstance(parameter, Tensor) and parameter.is_leaf and parameter.grad is not None:
                    self._given = ref(parameter), parameter.grad._version
                    self._left = parameter._version, id(parameter.grad)
                    return

    def updated(self) -> None:
        """Note an update by any optimizer."""
        self._given, self.is_left = None, False

    def epoch_ended(self) -> None:
        """Note that a data loader is at its end."""
        self.is_left = self._given is not None

    @property
    def has_same_weights(self) -> bool:
        """True if the weights are those of the newest pass."""
        parameter = None if self._given is None else self._given[0]()
        return parameter is not None and parameter._version == self._left[0]

    def is_untouched(self, *, num_clips: int) -> bool:
        """Return True if the loop has only clipped, so many times at most, the gradients left by the newest pass."""
        parameter = None if self._given is None else self._given[0]()
        if self._given is None or parameter is None or (gradient := parameter.grad) is None:
            return False
        return id(gradient) == self._left[1] and gradient._version - self._given[1] <= num_clips

    def is_cleared(self) -> bool:
        """Return True, once, if the gradients have been cleared or zeroed since the newest pass."""
        if self._given is None or (parameter := self._given[0]()) is None:
            return False
        gradient = parameter.grad
        # Clipping writes to gradients, too, but not at the end of an epoch.
        is_written = gradient is not None and gradient._version != self._given[1]
        if gradient is not None and not (is_written and (self.is_left or _is_zero(gradient))):
            return False
        self.updated()
        return True


def _is_zero(gradient: Tensor) -> bool:
    """True if that is known without waiting for a device."""
    local = getattr(gradient, "_local_tensor", gradient)
    return local.is_cpu and local.numel() > 0 and not local.any()
