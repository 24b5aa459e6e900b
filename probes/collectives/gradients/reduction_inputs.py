"""Check whether this rank's gradients were finite before their reduction. The result is read from the device only when
a step is refused.

    inputs = watch_fsdp_reductions()              # None if this torch's FSDP2 is not supported
    inputs.begin(step)                            # before the forward pass
    loss.backward()                               # one norm over the gradients of each reduce-scatter
    inputs.nonfinite(step)                        # True, False, or None if unknown. Waits for the device.

A reduction spreads a NaN to every rank, which hides where it came from. On the host the wrapper of process groups
checks each input (`call_records`). NCCL groups are not wrapped, so the function in which FSDP2 passes gradients to its
reduce-scatter is replaced instead. The replacement adds one `_foreach_norm` (maximum norm) for each group of
parameters: no copy, no synchronisation, and a few numbers per parameter.

Values of several recent computations are kept: the trainer judges a step while the next one is computed, and may
recompute a suspicious step, so one step may have several values. The trainer adds each bucket of its DDP
(`trainer.parallel.ddp`). If DDP has another communication hook, only the gradient of the first layer's output is
checked (`watch_first_layer`), to which a NaN in an activation propagates.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...fail_open import failing_open, probes_disabled, record_error
from ...torch_compat import foreach_norm, fsdp_param_group
from .input_gradient import on_input_gradient

__all__ = ["ReductionInputs", "watch_first_layer", "watch_fsdp_reductions"]

_REDUCE = "foreach_reduce"
"""Name under which FSDP2's parameter groups call the function that reduces gradients."""
KEPT_COMPUTATIONS = 4
"""Computations kept: a step, the next one (already computed), and recomputations of both."""


class ReductionInputs:
    """Largest absolute values of the reduction inputs in the newest steps."""

    def __init__(self, *, are_all: bool = True) -> None:
        self._are_all = are_all
        """True if every gradient is checked, so that "finite" is certain."""
        self._by_step: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=KEPT_COMPUTATIONS)

    def begin(self, step: int) -> None:
        """Start a step: later reductions belong to it."""
        self._by_step.append((step, []))

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add gradients that are about to be reduced."""
        if self._by_step:
            self._by_step[-1][1].extend(foreach_norm(list(gradients), math.inf))

    def nonfinite(self, step: int) -> bool | None:
        """Return True if any input was NaN or Inf in this step; None if unknown."""
        with failing_open("collectives.reduction_inputs"):
            largest = [value for number, values in self._by_step if number == step for value in values]
            if largest:
                is_bad = not bool(torch.stack([value.float() for value in largest]).isfinite().all())
                return is_bad if is_bad or self._are_all else None
        return None


def watch_fsdp_reductions() -> ReductionInputs | None:
    """Check FSDP2's reduction inputs from now on. A second call in the same process replaces the first."""
    if probes_disabled():
        return None
    with failing_open("collectives.reduction_inputs"):
        fsdp, inputs = fsdp_param_group(), ReductionInputs()
        setattr(fsdp, _REDUCE, _checking(getattr(fsdp, _REDUCE), inputs))
        return inputs
    return None


def watch_first_layer(model: nn.Module) -> ReductionInputs:
    """Check the gradient of the first layer's output from now on."""
    inputs = ReductionInputs(are_all=False)
    on_input_gradient(model, lambda gradient: inputs.add([gradient]))
    return inputs


def _checking(real: Callable[..., Any], inputs: ReductionInputs) -> Callable[..., Any]:
    real = getattr(real, "__wrapped__", real)

    @functools.wraps(real)
    def foreach_reduce(fsdp_params: Any, unsharded_grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        try:
            inputs.add(unsharded_grads)
        except Exception as error:
            record_error("collectives.reduction_inputs", error)
        return real(fsdp_params, unsharded_grads, *args, **kwargs)

    return foreach_reduce
