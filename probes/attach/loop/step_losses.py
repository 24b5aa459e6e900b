"""Loss and tokens of a step, observed in the loop: tensors on which `backward` is called, and ids passed to an
embedding.

    losses.watch(model)
    losses.step_began()
    losses.forward(model, args, kwargs)  # the model is called
    losses.backward(root)                # torch.autograd.backward(root), which loss.backward() calls
    losses.log(loss=..., tokens=...)     # values that the loop logs
    losses.settle()                      # the step ends: write what is known

Several backward passes in a step, each with its own forward pass, are micro-batches. If the loop divides each loss by
the number of passes, the step's loss is the sum of the losses. Otherwise it is their mean. The autograd graph shows
each loss's factor. The loop divides if the factors add up to at most 1, or if each is at most 1 / number of passes.
A factor that is an integer tensor is a count of tokens or samples, as are the targets of a summed cross entropy: the
step's loss is then the mean of all of them, the sum of the losses divided by the sum of the counts.

Several losses of one forward pass are parts of one loss and are summed. Losses belong to one pass if no forward pass
lies between their backward passes, or if no model was called twice (a backbone and a head per task may be separate
models). A loop that calls `model.forward` shows no forward pass. There, a backward pass that frees its graph is the
last of its forward pass. `torch.distributed.pipelining` passes a list: the loss of one micro-batch.

Passes with different weights, as in sharpness-aware minimization and line searches, are not micro-batches. The step's
loss is the first loss, computed with the weights before the update and returned by these optimizers. A NaN gradient in
the first pass makes the second pass's weights and loss NaN. So the first loss and the largest weight of the
last pass are kept (`FIRST_LOSS`, `LARGEST_WEIGHT`). A NaN or Inf in a later pass makes the step's loss NaN.

Losses that an optimizer other than the leader has used (a discriminator's, or an architecture's on a second loader), or
none (`remainder`), count only if the step has no other loss. A NaN or Inf among them makes the step's loss NaN. Since
an update with a NaN spoils the later losses on all ranks, the loss before the step's first update is kept, too
(`FIRST_LOSS`).

A value that the loop logs takes precedence. The measured value is kept too (`local_loss`, and the series
`MEASURED + name`), to detect a logged value that means something else (`analyzers.numerics.logged_values`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...fail_open import failing_open
from ...step_scalars import StepScalars
from ...torch_compat import foreach_norm
from .loss_scaling import LossScaling, count_in, input_of, product_in
from .tokens import looks_up_tokens, num_padded, num_tokens
from .update_line import Frames
from .weak_objects import WeakObjects

__all__ = ["FIRST_LOSS", "LARGEST_WEIGHT", "MEASURED", "StepLosses"]

MEASURED = "measured_"
"""Prefix of a column's name for the series of measured values, written if the loop logs its own value."""
FIRST_LOSS = "loss_of_first_pass"
LARGEST_WEIGHT = "largest_weight_of_last_pass"
"""Series that are recorded for steps in which the passes have different weights; the second one only for passes that an
optimizer such as sharpness-aware minimization makes."""
MIN_SCALE = 128.0
"""Minimum initial loss scale. Common initial values range from 128 to 2^32."""
_TOLERANCE = 1e-4
_OTHER_LOSSES = frozenset(
    {
        "val", "valid", "validation", "eval", "test", "best", "scaled",
        # Names of values that are computed over several steps, and may be NaN before the first of them.
        "avg", "average", "mean", "running", "smooth", "smoothed", "ema", "last", "prev", "previous", "old", "epoch",
        "init", "initial", "history",
    }
)  # fmt: skip
"""Words in the names of losses other than the step's."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """What `backward` was called on."""

    value: float | Tensor
    factor: float
    count: float | Tensor | None  # number of tokens or samples by which the loop has multiplied a mean


@dataclass
class _Passes:
    """Losses and counts of the passes of a step so far."""

    losses: list[_Loss]
    forwards: Counter[int]
    groups: int
    tokens: int
    padded: int | Tensor

    def __sub__(self, before: _Passes) -> _Passes:
        added = self.groups - before.groups, self.tokens - before.tokens, self.padded - before.padded
        return _Passes(self.losses[len(before.losses) :], self.forwards - before.forwards, *added)


class StepLosses:
    """The losses of one loop."""

    def __init__(self, values: StepScalars, scaling: LossScaling) -> None:
        self._values = values
        self._scaling = scaling
        self._losses: list[_Loss] = []
        self._forwards: Counter[int] = Counter()  # id of a model's hooks -> number of forward passes of that model
        self._unseen = 0  # 1 if the first backward pass came without a forward pass
        self._groups = 0  # number of groups; a group is backward passes with no forward pass between them
        self._follows_forward = True
        self._keeps_graph = False
        self._has_scale: bool | None = None  # None: no loss had a factor above 1 yet
        self._tokens = 0
        self._padded: int | Tensor = 0
        self._language_models = WeakObjects()
        self._version: tuple[int, int] | None = None  # tensor version of a weight at the last forward pass
        self._largest_weight: Tensor | None = None
        self._logged: set[str] = set()
        self._updated: _Passes | None = None  # passes before an update of which it is unknown whether it ends the step
        self._held: _Passes | None = None  # passes of the step that is about to begin
        self._aside: list[_Passes] = []  # passes that other optimizers have used, or none
        self._cleared: tuple[_Passes, bool] | None = None  # passes whose gradients were cleared in this step
        self._before_updates: float | Tensor | None = None  # loss before the step's first update, if others may follow

    def watch(self, model: nn.Module) -> None:
        """Count the tokens of `model` if it is a language model."""
        if looks_up_tokens(model):
            self._language_models.add(model)

    def step_began(self) -> None:
        """Forget the losses and tokens of the previous step, except those moved to this step."""
        self._scaling.step_began()
        self._losses.clear()
        self._logged.clear()
        self._forwards.clear()
        self._aside.clear()
        self._unseen = self._groups = self._tokens = self._padded = 0
        self._version = self._largest_weight = self._updated = self._before_updates = self._cleared = None
        if self._held is not None:
            self._set(self._held)
            self._held = None

    def updated(self, *, may_go_on: bool) -> None:
        """Note the step's update. `may_go_on`: later passes belong to this step too if another optimizer uses them."""
        if may_go_on:
            self._updated = self._passes()
            self._note_first()

    def _note_first(self) -> None:
        if self._before_updates is None and self._losses:
            self._before_updates = _combined(self._losses)

    def move_to_next_step(self) -> None:
        """Move the passes since the newest update to the step that is about to begin: the same optimizer uses them."""
        if (before := self._updated) is not None:
            self._held = self._passes() - before
            self._set(before)
            self._largest_weight = self._updated = None

    def set_aside(self) -> None:
        """Note that an optimizer other than the leader uses the losses so far, or those since the leader's update."""
        kept = self._updated or _Passes([], Counter(), 0, self._tokens, self._padded)
        if (used := self._passes() - kept).losses:
            self._note_first()
            self._aside.append(used)
            self._losses, self._forwards = kept.losses[:], kept.forwards.copy()
            self._groups, self._largest_weight = kept.groups, None

    def _take_back(self) -> None:
        """Use the losses that were set aside if there is no other."""
        if self._aside and not self._losses:
            one = self._aside.pop()
            self._losses, self._forwards, self._groups = one.losses, one.forwards, one.groups

    def _passes(self) -> _Passes:
        return _Passes(self._losses[:], self._forwards.copy(), self._groups, self._tokens, self._padded)

    def _set(self, passes: _Passes) -> None:
        self._losses, self._forwards = passes.losses, passes.forwards
        self._groups, self._tokens, self._padded = passes.groups, passes.tokens, passes.padded

    def forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note a forward pass with gradients."""
        # The copies that meta-learning makes for each task share this dictionary: they count as one model.
        self._forwards[id(model._forward_pre_hooks)] += 1
        self._follows_forward = True
        if model in self._language_models:
            self._tokens += num_tokens(args, kwargs)
            self._padded = self._padded + num_padded(args, kwargs)
        weight = next(model.parameters(), None)
        before, self._version = self._version, (id(weight), getattr(weight, "_version", 0))
        if self._losses and before is not None and before[0] == id(weight) and before != self._version:
            with failing_open("attach.weights"):
                self._largest_weight = _largest_weight(model)

    def backward(
        self,
        tensors: Any = None,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **unused: Any,
    ) -> None:
        """Note a backward pass, with the arguments of `torch.autograd.backward`."""
        is_list = isinstance(tensors, (list, tuple))
        roots = list(tensors) if is_list else [tensors]
        if not roots or not all(isinstance(root, Tensor) and root.numel() == 1 for root in roots):
            return
        if is_list:
            if not isinstance(grad_tensors, (list, tuple, type(None))) or any(
                one is not None for one in grad_tensors or ()
            ):
                return  # outputs of a stage of a pipeline, with the gradients that the next stage has sent
            self._follows_forward = True  # its last stage makes the forward passes of several micro-batches first
        if not self._losses:  # the forward pass may have been counted for the previous step
            self._unseen = 0 if self._forwards else 1
        if self._follows_forward or not self._losses or not (self._forwards or self._keeps_graph):
            self._groups += 1
        self._follows_forward = False
        self._keeps_graph = create_graph if retain_graph is None else retain_graph
        for root in roots:
            self._add(root)

    def _add(self, root: Tensor) -> None:
        """Note a loss of the newest pass."""
        loss = self._scaling.unscaled(root)
        # A scaler made the last operation of the loss.
        last = root.grad_fn if loss is root else input_of(root.grad_fn)
        factor, count = abs(product_in(last)), count_in(last)
        if loss is root and count is None and self._is_scale(factor):
            loss, factor = root.detach() / factor, 1.0
        is_plain = type(loss) is Tensor and loss.is_cpu  # the value on the CPU is known without waiting for a device
        self._losses.append(_Loss(loss.item() if is_plain else loss.detach().reshape(()), factor, count))

    def _is_scale(self, factor: float) -> bool:
        """Return True if the loop itself scales the loss by `factor`. The loop's first factor above 1 decides: a scale
        is a power of two and too large for a loss weight.

        A scale must not be part of the loss, or the loss would jump each time the scale grows.
        """
        if self._has_scale is None and factor > 1:
            self._has_scale = factor >= MIN_SCALE and math.frexp(factor)[0] == 0.5
        return bool(self._has_scale) and factor > 1

    def log(self, /, **values: float | Tensor) -> None:
        """Write values that the loop logs itself."""
        self._logged |= values.keys() & {"loss", "tokens", "grad_norm"}
        if "loss" in values and not self._losses:
            values.setdefault("local_loss", values["loss"])
        self._values.put(**values)

    def keep_newest(self) -> None:
        """Forget all losses of this step but the newest. The earlier ones belong to steps of which the end was not
        detected."""
        del self._losses[:-1]
        self._forwards.clear()
        self._unseen = self._groups = min(self._groups, 1)

    def forget(self) -> None:
        """Forget all losses of this step so far, since the loop has dropped their gradients."""
        self._losses.clear()
        self._forwards.clear()
        self._unseen = self._groups = 0

    def cleared(self) -> None:
        """Note that the loop has cleared the gradients of all losses of this step so far: it may have copied them."""
        self._cleared = self._passes(), self._follows_forward

    def forget_cleared(self) -> None:
        """Forget the losses whose gradients were cleared, since the update does not use them."""
        if self._cleared is not None:
            before, is_called = self._cleared
            left = self._passes() - before
            self._losses, self._forwards, self._groups = left.losses, left.forwards, left.groups
            self._unseen = int(is_called)  # the first pass may have been called before the clearing
            self._cleared = None
            self._aside += [before] if before.losses else []

    @property
    def has_trained(self) -> bool:
        """Return True if this step has a loss. Passes of the model alone may be an evaluation in training mode."""
        return bool(self._losses) or bool(self._aside) or bool(self._logged)

    @property
    def are_finite(self) -> bool:
        """True if this is known of all losses of this step without waiting for a device."""
        return all(isinstance(one.value, float) and math.isfinite(one.value) for one in self._losses)

    def settle(self, measured_norm: float | Tensor | None = None) -> None:
        """Write the step's loss and tokens; values that the loop has logged itself go to their `MEASURED` series."""
        values: dict[str, float | Tensor] = {}
        if self._aside and self._before_updates is not None:
            values[FIRST_LOSS] = self._before_updates
        self._take_back()
        if self._losses:
            values["local_loss"] = loss = self._loss()
            if "loss" not in self._logged:
                values["loss"] = loss
        if self._tokens > 0:
            values[MEASURED + "tokens" if "tokens" in self._logged else "tokens"] = self._tokens
        if self._tokens > 0 and (isinstance(self._padded, Tensor) or self._padded):
            values["padded_tokens"] = self._padded
        if measured_norm is not None and "grad_norm" in self._logged:
            values[MEASURED + "grad_norm"] = measured_norm
        if self._losses and self._largest_weight is not None:
            values |= {FIRST_LOSS: _combined(self._losses[:1]), LARGEST_WEIGHT: self._largest_weight}
        if values:
            self._values.put(**values)
        self._losses.clear()

    def failed(self, frames: Frames) -> None:
        """Write the loss of a step that an exception or exit ends. A loop that stops at a NaN has computed the loss,
        often only in a variable and before the backward pass. A loss on a device is not read: this could block forever.
        """
        self._take_back()
        loss = self._loss() if self._losses else None
        columns = {"loss": loss, "local_loss": loss} if isinstance(loss, float) else {}
        columns |= _bad_loss_in(frames[-1][0].f_locals) if frames else {}
        if "loss" in self._logged:
            columns.pop("loss", None)
        if columns:
            self._values.put_in_open_step(**columns)

    def _loss(self) -> float | Tensor:
        total = _combined(self._losses)
        for one in self._aside:
            total = total + 0.0 * _combined(one.losses)  # NaN if any of these losses is NaN
        if self._largest_weight is not None:
            return _combined(self._losses[:1]) + 0.0 * total  # NaN if any later loss is NaN
        passes = min(self._groups, self._unseen + max(self._forwards.values(), default=self._groups))
        factors = [one.factor for one in self._losses]
        is_whole = passes < 2 or all(one.count is not None for one in self._losses)
        return total if is_whole or min(sum(factors), passes * max(factors)) <= 1 + _TOLERANCE else total / passes


def _combined(losses: list[_Loss]) -> float | Tensor:
    """The sum of the losses, or the mean of all that they count."""
    first, *others = losses
    total = sum((one.value for one in others), first.value)
    counts = [one.count for one in losses if one.count is not None]
    if len(counts) < len(losses):
        return total
    count = sum(counts[1:], counts[0])
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _bad_loss_in(variables: Mapping[str, Any]) -> dict[str, float]:
    """Columns for a loss among these variables that is NaN or Inf. A tensor that requires gradients is this rank's
    loss; a float may have been reduced over ranks, and an Inf may be the initial value of a minimum."""
    words = {name: set(name.lower().split("_")) for name in variables if "loss" in name.lower()}
    named = [variables[name] for name, parts in words.items() if not parts & _OTHER_LOSSES]
    local = [one for one in named if type(one) is Tensor and one.requires_grad and one.is_cpu and one.numel() == 1]
    if not all(math.isfinite(one.item()) for one in local):
        return {"loss": math.nan, "local_loss": math.nan}
    return {"loss": math.nan} if any(isinstance(one, float) and math.isnan(one) for one in named) else {}


def _largest_weight(model: nn.Module) -> Tensor | None:
    """The largest magnitude of the weights that this rank holds; NaN if any of them is NaN."""
    held = [getattr(weight, "_local_tensor", weight).detach() for weight in model.parameters()]
    weights = [weight for weight in held if weight.numel() and weight.is_floating_point()]
    largest = foreach_norm(weights, math.inf) if weights else []
    return torch.stack([one.float().to(largest[0].device) for one in largest]).amax() if largest else None
