"""Count the updates in a step of a loop: by one optimizer, by several with a loss each, or by hand.

    updates.passed(models)               # a backward pass is over; the models whose optimizer is not known
    updates.begins(optimizer)            # an optimizer steps
    updates.was_by_hand(model)           # a pass that trains begins: what `model` had of gradients was used and cleared

Models that are trained in turn against separate losses (GANs, actors and critics) have no loss whose size is a
measure of progress: an event says so (`analyzers.numerics.policy_loss`). A loop without an optimizer, that subtracts
gradients itself, ends its steps where it clears them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..recorder import Recorder
from ..tape import event_kinds

__all__ = ["Updates"]

TURNS = 3
"""Alternations between two optimizers, each with its own backward pass, from which models are trained in turn."""


class Updates:
    """The updates of one loop."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_passed = False
        self._last: object = None
        self._seen: set[int] = set()
        self._turns = 0
        self._with_gradients: set[int] = set()

    def passed(self, models: Iterable[object] = ()) -> None:
        """A backward pass is over."""
        self._has_passed = True
        for model in models:
            if isinstance(model, nn.Module) and _has_gradient(model):
                self._with_gradients.add(id(model))

    def begins(self, optimizer: Any) -> None:
        """An optimizer steps; the one that steps after it without a backward pass updates for the same loss."""
        if not self._has_passed:
            return
        self._has_passed = False
        self._with_gradients.clear()
        if self._last is not optimizer and id(optimizer) in self._seen:
            self._turns += 1
            if self._turns == TURNS:
                self._recorder.event(event_kinds.TRAINED_IN_TURN)
        self._seen.add(id(optimizer))
        self._last = optimizer

    def was_by_hand(self, model: nn.Module) -> bool:
        """Return True if gradients of this model are gone, though no optimizer has stepped."""
        if id(model) not in self._with_gradients or _has_gradient(model):
            return False
        self._with_gradients.clear()
        return True


def _has_gradient(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
