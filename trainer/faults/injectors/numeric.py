"""Numeric faults: NaN, Inf, an overflow, a learning rate that is too high.

ARM["nan_grad"](trigger, training)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.config import Config
from trainer.faults.trigger import Trigger, change_gradient, in_training
from trainer.training import rank_training as training_module
from trainer.training.rank_training import Training

__all__ = ["ARM", "arm_nan_grad"]

_LARGE = 3e38
"""Finite in float32, in which the largest number is 3.4e38. The sum of two such values overflows."""


def arm_nan_grad(trigger: Trigger, training: Training) -> None:
    """One element of one gradient becomes NaN before it is reduced."""
    _arm_gradient(trigger, training, math.nan)


def _arm_overflow(trigger: Trigger, training: Training) -> None:
    _arm_gradient(trigger, training, _LARGE)


def _arm_gradient(trigger: Trigger, training: Training, value: float) -> None:
    last = list(training.modules[-1].blocks)[-1]
    name = trigger.fault.parameter or f"blocks.{last}.mlp.up.weight"
    change_gradient(trigger, training, name, lambda gradient: _with_first(gradient, value))


def _arm_inf_activation(trigger: Trigger, training: Training) -> None:
    def after_forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return _with_first(output, math.inf) if in_training(module) and trigger.due() else None

    list(training.modules[-1].blocks.values())[-1].register_forward_hook(after_forward)


def _with_first(tensor: Tensor, value: float) -> Tensor:
    """Copy of a tensor with the first element on this rank replaced."""
    bad = tensor.clone()
    local = bad.to_local() if isinstance(bad, DTensor) else bad
    with torch.no_grad():
        local.view(-1)[0] = value
    return bad


def _arm_lr_spike(trigger: Trigger, training: Training) -> None:
    _scale_rate(lambda step: (trigger.fault.factor or 100.0) if trigger.due() else 1.0)


def _arm_divergence(trigger: Trigger, training: Training) -> None:
    growth = trigger.fault.factor or 1.1
    _scale_rate(lambda step: growth ** (step - trigger.fault.step) if trigger.lasting() else 1.0)


def _scale_rate(scale: Callable[[int], float]) -> None:
    """Multiply the learning rate that the training reads, so that the scaled rate is recorded."""
    rate_of = vars(training_module)["learning_rate"]  # another fault may have changed it already

    def scaled(step: int, config: Config) -> float:
        rate: float = rate_of(step, config)
        return rate * scale(step + 1)

    training_module.learning_rate = scaled  # type: ignore[attr-defined]


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "nan_grad": arm_nan_grad,
    "inf_activation": _arm_inf_activation,
    "overflow": _arm_overflow,
    "lr_spike": _arm_lr_spike,
    "divergence": _arm_divergence,
}
