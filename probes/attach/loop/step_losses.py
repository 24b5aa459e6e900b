"""Loss and tokens of a step, observed in the loop: tensors that `backward` is called on, ids given to an embedding.

    losses.began()                       # a step has begun
    losses.forward(tokens)               # the model was called
    losses.backward(root)                # loss.backward()
    losses.log(loss=..., tokens=...)     # the loop logs its own
    losses.settle()                      # the step ends: write what is known

Several backward passes of a step are its micro-batches, each with its own forward pass. A loop that divides each loss
by their number has the sum as its step's loss, any other the mean; the autograd graph shows whether it divides. Several
losses of one forward pass are parts of one loss, and are summed.

A value that the loop logs takes precedence. The measured one is kept too (`local_loss`, and the series
`MEASURED + name`), to detect a logged value that means something else (`analyzers.numerics.logged_values`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...step_scalars import StepScalars
from .loss_scaling import LossScaling

__all__ = ["MEASURED", "StepLosses"]

MEASURED = "measured_"
"""Prefix of a column's name: series of the measured value, written where the loop logs its own."""
_SAME = 1e-4
_MAX_DEPTH = 4


class StepLosses:
    """The losses of one loop."""

    def __init__(self, values: StepScalars, scaling: LossScaling) -> None:
        self._values = values
        self._scaling = scaling
        self._losses: list[float | Tensor] = []
        self._factors: list[float] = []
        self._forwards = 0
        self._tokens = 0
        self._padded: int | Tensor = 0
        self._logged: set[str] = set()

    def began(self) -> None:
        """A step has begun."""
        self._scaling.began()
        self._losses.clear()
        self._factors.clear()
        self._logged.clear()
        self._forwards = self._tokens = self._padded = 0

    def forward(self, tokens: int, padded: int | Tensor = 0) -> None:
        """Note a forward pass with gradients: number of ids, and how many of them are padding."""
        self._forwards += 1
        self._tokens += tokens
        self._padded = self._padded + padded

    def backward(self, root: Any) -> None:
        """Note a backward pass; `root` is the tensor on which the loop called it."""
        if not isinstance(root, Tensor) or root.numel() != 1:
            return
        self._forwards = max(self._forwards, 1)  # its forward pass may have been counted for the step before
        loss = self._scaling.unscaled(root)
        self._factors.append(_factor(root) if loss is root else _factor_behind(root))
        is_plain = type(loss) is Tensor and loss.is_cpu  # nothing to wait for, and not made by the probes
        self._losses.append(loss.item() if is_plain else loss.detach().reshape(()))

    def log(self, /, **values: float | Tensor) -> None:
        """Write values that the loop knows itself."""
        self._logged |= values.keys() & {"loss", "tokens", "grad_norm"}
        if "loss" in values and not self._losses:
            values.setdefault("local_loss", values["loss"])
        self._values.put(**values)

    def keep_newest(self) -> None:
        """Forget all losses of this step but the newest: earlier ones belong to steps whose end was not detected."""
        del self._losses[:-1], self._factors[:-1]
        self._forwards = min(self._forwards, 1)

    @property
    def has_trained(self) -> bool:
        """Return True if this step has a loss. Passes of the model alone may be an evaluation in training mode."""
        return bool(self._losses) or bool(self._logged)

    def settle(self, measured_norm: float | Tensor | None = None) -> None:
        """Write the step's loss and tokens, and the measured ones where the loop has logged its own."""
        own: dict[str, float | Tensor] = {}
        if self._losses:
            own["local_loss"] = loss = self._loss()
            if "loss" not in self._logged:
                own["loss"] = loss
        if self._tokens > 0:
            own[MEASURED + "tokens" if "tokens" in self._logged else "tokens"] = self._tokens
        if self._tokens > 0 and (isinstance(self._padded, Tensor) or self._padded):
            own["padded_tokens"] = self._padded
        if measured_norm is not None and "grad_norm" in self._logged:
            own[MEASURED + "grad_norm"] = measured_norm
        if own:
            self._values.put(**own)
        self._losses.clear()
        self._factors.clear()

    def failed(self) -> None:
        """Write the loss of a step that an exception or exit ends: a loop that raises at a NaN has it already.

        Not a loss on a device: reading it could wait for ever.
        """
        if self._losses and isinstance(loss := self._loss(), float):
            self._values.put_in_open_step(local_loss=loss, **({} if "loss" in self._logged else {"loss": loss}))

    def _loss(self) -> float | Tensor:
        total: float | Tensor = sum(self._losses[1:], self._losses[0])
        number = len(self._losses)
        is_divided = any(abs(factor - 1) > _SAME for factor in self._factors)
        return total if number == 1 or is_divided or self._forwards < number else total / number


def _factor(root: Tensor) -> float:
    """Factor by which the graph's last multiplications and divisions scale the loss; 1 if there are none."""
    return _product(root.grad_fn)


def _factor_behind(root: Tensor) -> float:
    """Factor of a scaled loss, whose last operation is the scaler's."""
    following = getattr(root.grad_fn, "next_functions", ())
    return _product(following[0][0]) if following else 1.0


def _product(node: Any) -> float:
    product = 1.0
    for _ in range(_MAX_DEPTH):
        name = type(node).__name__
        if name not in ("DivBackward0", "MulBackward0"):
            break
        other = getattr(node, "_saved_other", None)
        if not isinstance(other, Tensor) or other.numel() != 1 or not other.is_cpu or other.requires_grad:
            return 0.0 if name == "DivBackward0" else product  # divided by a number that only the device has
        number = other.item()
        product *= number if name == "MulBackward0" else 1 / number if number else 0.0
        following = getattr(node, "next_functions", ())
        node = following[0][0] if following else None
    return product
