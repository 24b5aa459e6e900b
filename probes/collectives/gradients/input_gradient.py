"""Norm of the gradient that reaches a model's first layer: this rank's own, before any reduction.

    norms = InputGradientNorms()
    undo = norms.watch(model)       # one kernel for each backward pass; nothing waits for the device
    norms.take_largest()            # before the optimizer's step: the largest norm, on the device, or None

A NaN that a rank produces in its backward pass propagates to its first layer, and the reduction then spreads it to all
ranks. The gradient of the first layer's output is not reduced over data-parallel ranks, so if it is not finite, this
rank made the NaN. A finite gradient proves nothing: the gradient of a single weight may still be NaN. On the host the
wrapper of process groups looks at every buffer instead (`collectives.call_records`). Code that `torch.compile` traces
does not call the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...fail_open import record_error
from .model_hook import ModelHook

__all__ = ["INPUT_GRADIENT", "InputGradientNorms", "on_input_gradient"]

INPUT_GRADIENT = "input_gradient_norm"
"""Series of a rank's norms."""
MAX_PASSES = 256
"""Maximum number of backward passes per step for which norms are kept."""


class InputGradientNorms:
    """The norms of the backward passes of one step."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Measure from now on, if the model is not on the CPU and there are other ranks; returns a function that undoes
        this.
        """
        weight = next(model.parameters(), None)
        is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        if weight is None or weight.is_cpu or is_alone or torch.distributed.get_world_size() == 1:
            return lambda: None
        return on_input_gradient(model, self.add)

    def add(self, gradient: Tensor) -> None:
        """Measure the gradient of one backward pass."""
        if len(self._norms) < MAX_PASSES:
            dtype = torch.float32 if gradient.element_size() < 4 else None
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=dtype))

    def take_largest(self) -> Tensor | None:
        """Return the largest norm since the last call, NaN if any was NaN; None without a backward pass."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).amax() if len(norms) > 1 else norms[0] if norms else None


def on_input_gradient(model: nn.Module, use: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `use` with each gradient of the first layer's output (of a DTensor, with the local part). Returns a function
    that undoes this."""
    layer = _first_layer(model)
    if layer is None:
        return lambda: None

    def on_gradient(gradient: Tensor) -> None:
        try:
            use(getattr(gradient, "_local_tensor", gradient).detach())
        except Exception as error:
            record_error("input_gradient", error)

    def after_forward(_: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    return layer.register_forward_hook(ModelHook(layer, after_forward)).remove


def _first_layer(model: nn.Module) -> nn.Module | None:
    """First leaf module, in order of definition, with a trained parameter."""
    for module in model.modules():
        if not any(True for _ in module.children()) and any(weight.requires_grad for weight in module.parameters()):
            return module
    return None
