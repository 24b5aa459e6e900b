"""fp16 loss scaling: unscaled losses, the scale at each step, and skipped steps. Factors by which a loop scales a loss.

    scaling = LossScaling(phases)
    scaling.patch(imports)
    scaling.unscaled(root)       # the loss behind the tensor that backward() is called on
    product_in(root.grad_fn)     # 0.25: the loop has divided the loss by 4
    count_in(root.grad_fn)       # 512: the loop has multiplied the loss by a number of tokens

A scaler multiplies the loss before `backward`, and skips the optimizer's step if a gradient overflowed. Supported are
torch's `GradScaler` and subclasses (used by Accelerate and Lightning), and the scalers of DeepSpeed and Megatron-core.
The scale is the series `loss_scale` of the table `scalars`; a skipped step is a step that is not committed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...device.capture import is_capturing
from ...fail_open import failing_open
from ..patching.on_import import OnImport

__all__ = ["SCALAR", "LossScaling", "count_in", "input_of", "product_in"]

SCALAR = "loss_scale"
"""Name of the series."""
_COUNTS = frozenset((torch.int16, torch.int32, torch.int64))
_INT8 = torch.zeros((), dtype=torch.int8, device="cpu")
_MAX_DEPTH = 4
_CROSS_ENTROPIES = frozenset(("NllLossBackward0", "NllLoss2DBackward0"))
_SUM = 2  # torch's number of reduction="sum"
_SCALE, _STEP, _OVERFLOW, _BACKWARD = "scales", "steps", "overflows", "scales_backward"
_PLACES = (
    ("torch.amp.grad_scaler", "GradScaler", "scale", _SCALE),
    ("torch.amp.grad_scaler", "GradScaler", "step", _STEP),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler", "scale", _SCALE),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase", "backward", _BACKWARD),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase", "scale_loss", _SCALE),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase", "update_scale", _OVERFLOW),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", "update_scale", _OVERFLOW),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer", "backward", _BACKWARD),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer", "_update_scale", _OVERFLOW),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", "backward", _BACKWARD),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", "_update_scale", _OVERFLOW),
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer", "scale_loss", _SCALE),
    ("megatron.core.optimizer.grad_scaler", "DynamicGradScaler", "update", _OVERFLOW),
)
"""(module, class, method, role). `overflows`: the method's argument tells whether a gradient overflowed."""


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    values: Any
    leader: Any
    num_updates: int

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def watch_optimizer(self, optimizer: Any, *, leads: bool = ...) -> Any: ...

    def refused(self) -> None: ...


class LossScaling:
    """Follows the loss scalers of one loop."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._scale: float | Tensor | None = None  # factor of the current step's losses
        self._scaled: list[tuple[weakref.ref[Tensor], Tensor]] = []  # (scaled, unscaled) since the last backward pass

    def patch(self, imports: OnImport) -> None:
        """Wrap the scalers' methods, now or once their modules are imported."""
        for module, owner, method, role in _PLACES:
            imports.when(module, partial(self._patch, owner, method, getattr(self, f"_{role}")))

    def _patch(self, owner: str, method: str, wrapper: Callable[..., Any], module: ModuleType) -> None:
        cls = getattr(module, owner, None)
        if cls is not None and method in vars(cls):
            self._phases.replace(cls, method, wrapper)

    def step_began(self) -> None:
        """Forget the scale and the losses of the previous step."""
        self._scale = None
        self._scaled.clear()

    def unscaled(self, root: Tensor) -> Tensor:
        """Return the unscaled loss for `root`, or `root` if no scaler was used for it."""
        scaled, self._scaled = self._scaled, []
        for reference, loss in scaled:
            if reference() is root:
                return loss
        return root.detach() / self._scale if scaled and self._scale is not None else root

    # ---- wrappers ----

    def _scales(self, real: Callable[..., Any], scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = real(scaler, outputs, *args, **kwargs)
        if scaled is not outputs:
            with failing_open("attach.loss_scale"):
                self._note_scale(scaler)
                losses = outputs if isinstance(outputs, (list, tuple)) else [outputs]
                results = scaled if isinstance(scaled, (list, tuple)) else [scaled]
                for loss, result in zip(losses, results, strict=False):
                    if isinstance(loss, Tensor) and isinstance(result, Tensor):
                        self._scaled.append((weakref.ref(result), loss.detach()))
        return scaled

    def _scales_backward(self, real: Callable[..., Any], scaler: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap a method that multiplies the loss and runs backward, so that the product is only visible inside it."""
        with failing_open("attach.loss_scale"):
            self._note_scale(scaler)
            if isinstance(loss, Tensor) and self._scale is not None:
                self._scaled.append((weakref.ref(loss), loss.detach()))
        return real(scaler, loss, *args, **kwargs)

    def _note_scale(self, scaler: Any) -> None:
        if self._scale is not None:
            return
        scale = _scale_of(scaler)
        if isinstance(scale, Tensor):  # copy the value, because the scaler changes it in place
            scale = scale.item() if scale.is_cpu else scale.detach().clone()
        if scale is not None:
            self._scale = scale
            self._phases.values.put(**{SCALAR: scale})

    def _steps(self, real: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with failing_open("attach.loss_scale"):
            # The scaler is called with the optimizer even if an overflow makes it skip the optimizer's first step.
            if self._phases.leader is None:
                self._phases.watch_optimizer(optimizer, leads=False)
        before = self._phases.num_updates
        result = real(scaler, optimizer, *args, **kwargs)
        with failing_open("attach.loss_scale"):
            if self._phases.num_updates == before and _is(optimizer, self._phases.leader):
                self._phases.refused()
        return result

    def _overflows(self, real: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        overflowed = args[0] if args else next(iter(kwargs.values()), False)
        with failing_open("attach.loss_scale"):
            if overflowed is True or (isinstance(overflowed, Tensor) and overflowed.is_cpu and bool(overflowed)):
                self._phases.refused()
        return real(scaler, *args, **kwargs)


def _scale_of(scaler: Any) -> float | Tensor | None:
    """The factor of a scaler of any kind; None if it does not scale."""
    for name in ("_scale", "loss_scale", "cur_scale"):
        scale = getattr(scaler, name, None)
        if isinstance(scale, (int, float, Tensor)):
            return scale
    config = getattr(scaler, "loss_scale_config", None)
    inner = getattr(scaler, "loss_scaler", None) or getattr(scaler, "grad_scaler", None)
    if config is not None:
        return float(config.cur_scale) if getattr(config, "use_grad_scaling", True) else None
    if inner is not None:
        return _scale_of(inner)
    get = getattr(scaler, "get_loss_scale", None)
    return get() if callable(get) else None


def _is(optimizer: Any, leader: Any) -> bool:
    """Return True if `leader` is the optimizer, or inside it."""
    for _ in range(4):
        if optimizer is leader:
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False


def input_of(node: Any) -> Any:
    """The operation that made the first operand of this one."""
    following = getattr(node, "next_functions", ())
    return following[0][0] if following else None


def count_in(node: Any) -> float | Tensor | None:
    """The integer tensor by which this node multiplies the loss, or the number of targets of which it sums the cross
    entropies (fairseq); None for other nodes. On a device it is copied without waiting, since the loop may change
    it."""
    name = type(node).__name__
    if is_capturing():
        return None
    if name in _CROSS_ENTROPIES and node._saved_reduction == _SUM:
        targets = _saved(node, "target")
        count = (targets != node._saved_ignore_index).sum() if isinstance(targets, Tensor) else None
        return count.item() if count is not None and count.is_cpu else count
    for other in (_saved(node, name) for name in ("other", "self")) if name == "MulBackward0" else ():
        # Unlike an integer tensor, a number in the program's text does not promote an int8.
        if type(other) is Tensor and other.numel() == 1 and torch.result_type(other, _INT8) in _COUNTS:
            return other.item() if other.is_cpu else other.detach().reshape(()).clone()
    return None


def product_in(node: Any) -> float:
    """Factor by which the multiplications and divisions that end in this node scale the loss; 1 if there are none."""
    product = 1.0
    for _ in range(_MAX_DEPTH):
        name = type(node).__name__
        if name not in ("DivBackward0", "MulBackward0"):
            break
        other = _saved(node, "other")
        if not isinstance(other, Tensor) or other.numel() != 1 or not other.is_cpu or other.requires_grad:
            return 0.0 if name == "DivBackward0" else product  # the divisor is on a device, so the factor is unknown
        number = other.item()
        product *= number if name == "MulBackward0" else 1 / number if number else 0.0
        node = input_of(node)
    return product


def _saved(node: Any, name: str) -> Any:
    """An operand that autograd has saved in this node; None if the program's hooks keep it. Reading would call its
    unpack hook, which may answer only once: offloaded activations are dropped when they are fetched back.
    """
    keeper = getattr(node, f"_raw_saved_{name}", None)
    return None if getattr(keeper, "unpack_hook", None) else getattr(node, f"_saved_{name}", None)
