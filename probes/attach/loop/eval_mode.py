"""Models that a loop trains in eval mode: fine-tuning without `train()`, or an evaluation that never goes back to it.

    modes.trains(model)        # a call with gradients enabled: True if it belongs to training
    modes.passed()             # a backward pass begins

A call in eval mode counts as an evaluation until a backward pass follows it without a call in training mode between.
From then on the model's calls train, until it is called in training mode.
"""

from __future__ import annotations

from torch import nn

from .living import Living

__all__ = ["EvalModeTraining"]


class EvalModeTraining:
    """The models of one loop."""

    def __init__(self) -> None:
        self._trained = Living()  # in eval mode
        self._called = Living()  # in eval mode with gradients, since the last backward pass
        self._is_known = False  # True if a training pass was called since the last backward pass

    def add(self, model: nn.Module) -> None:
        """Note a model found by what its optimizer updates: if it is in eval mode, it was trained in it."""
        if not model.training:
            self._trained.add(model)

    def __contains__(self, model: nn.Module) -> bool:
        return not model.training and model in self._trained

    def trains(self, model: nn.Module) -> bool:
        """Return True if a call with gradients enabled belongs to training."""
        if model.training:
            self._trained.discard(model)
        elif model not in self._trained:
            self._called.add(model)
            return False
        self._is_known = True
        return True

    def passed(self) -> None:
        """Note a backward pass: of the models that were called in eval mode, if none was in training mode."""
        if not self._is_known:
            for model in self._called:
                self._trained.add(model)
        self._called.clear()
        self._is_known = False
