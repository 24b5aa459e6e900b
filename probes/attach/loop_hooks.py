"""Steps and phases of a loop that nobody wrote for us, from hooks of torch.

    phases = LoopPhases(recorder, values)
    phases.watch_model(model)
    phases.watch_optimizer(optimizer)
    phases.patch()                           # what all share: backward, data loaders, clipping
    ...
    phases.remove()                          # all of it, exactly

A step lasts from what is first done for it (a batch fetched, a forward, a backward) to the first thing done for the
next one, and an optimizer's `step` says that there is a next one: several backward passes before it are one step, and
what is logged after it is still of this one. A fetch that ends an epoch begins no step. Of several optimizers the last
that is watched ends the step.

    data        a batch is fetched from a `torch.utils.data.DataLoader`
    forward     the model is called with gradients on; without gradients, or in eval mode, it is `evaluate`
    backward    `loss.backward()`; the scalar that it is called on is taken for the loss if nobody logs one
    optimizer   `optimizer.step()`
    checkpoint  a save by torch, safetensors or torch.distributed.checkpoint (`saves`)
    generation, reward, ...  what TRL's trainers do before they train (`trl_phases`)

Only the thread that attached is looked at.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader

from ..compilation import CompileProbe
from ..fail_open import failing_open, record_error
from ..gradients import GradientProbe
from ..recorder import Recorder
from ..step_scalars import StepScalars
from .saves import Saves
from .tokens import looks_up_tokens, num_tokens
from .trl_phases import TrlPhases

__all__ = ["LoopPhases"]

MAX_EXAMINED = 3
"""Steps in a row whose gradients are looked at one by one because they are not finite: more would say the same."""
_monotonic_ns = time.monotonic_ns
_LOGGED = -1  # tokens of a step that the loop has logged itself
_NOTHING: Mapping[str, Any] = {}


class LoopPhases:
    """The hooks of one recorder."""

    def __init__(self, recorder: Recorder, values: StepScalars, *, gradient_norm: bool = True) -> None:
        self.recorder = recorder
        self.values = values
        self.gradients: GradientProbe | None = None
        self.automatic = True
        """Whether the optimizer says where steps end; false where the loop does."""
        self._thread = get_ident()
        self._wants_norm = gradient_norm
        self._undo: list[Callable[[], object]] = []
        self.leader: Any = None
        """The optimizer whose step ends the loop's."""
        self._watched: dict[int, object] = {}
        self._language_models: set[int] = set()
        self._tokens = 0
        self._open: dict[str, Any] = {}  # kind -> span
        self._depth = 0  # of calls of a model from within a model
        self._number = 0
        self._in_step = False
        self._taken_ns = 0  # when the optimizer's step of the current one was over
        self._microbatch = 0
        self._losses: list[float | Tensor] = []
        self._norm: Tensor | None = None
        self._logged = False
        self._examined = 0
        self.at_first_update: list[Callable[[], None]] = []
        """Called once, after the first step: by then all that trains has been made."""
        self._compilation = CompileProbe(recorder)

    # ---- what is looked at ----

    def watch_model(self, model: nn.Module) -> None:
        """Time the calls of `model`: the outermost module, as the loop calls it."""
        self._compilation.hook()
        if self._is_known(model):
            return
        if looks_up_tokens(model):
            self._language_models.add(id(model))
        self._undo.append(model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True).remove)
        self._undo.append(model.register_forward_hook(self._after_forward, always_call=True).remove)

    def watch_optimizer(self, optimizer: Any, *, leads: bool = True) -> None:
        """Time `step` of an optimizer of torch's, or of whatever wraps one and has a `step` method.

        One that `leads` ends the loop's steps from now on; one that does not, only if there is no other.
        """
        inner = optimizer
        while not isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            inner = inner.optimizer  # Accelerate's is an Optimizer that holds the one that steps
        if leads or self.leader is None:
            self.leader = inner
        if self._is_known(inner):
            return
        if not isinstance(inner, torch.optim.Optimizer):
            self._wrap_step(inner)
            return
        self._undo.append(inner.register_step_pre_hook(self._before_step).remove)
        self._undo.append(inner.register_step_post_hook(self.after_update).remove)

    def watches(self, watched: object) -> bool:
        """Return True for a model or optimizer that has its hooks."""
        return id(watched) in self._watched

    def _is_known(self, watched: object) -> bool:
        if self.watches(watched):
            return True
        self._watched[id(watched)] = watched
        return False

    def _wrap_step(self, optimizer: Any) -> None:
        real = optimizer.step

        @functools.wraps(real)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.before_update(optimizer)
            result = real(*args, **kwargs)
            self.after_update(optimizer)
            return result

        optimizer.step = step
        self._undo.append(lambda: optimizer.__dict__.pop("step", None))

    def patch(self) -> None:
        """Look at every backward pass, data loader and clipping of this thread, and at what torch compiles."""
        self._compilation.hook()
        self._undo.append(self._compilation.remove)
        self.replace(torch.autograd, "backward", self._backward)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", self._fetch)
        self.replace(clip_grad, "_get_total_norm", self._total_norm)
        for late in (Saves(self), TrlPhases(self)):  # of libraries that may be imported after this
            late.patch()
            self.at_first_update.append(late.patch)

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Put `wrapper(real, ...)` in the place of a function, for this thread, until `remove`."""
        real = getattr(place, name)

        @functools.wraps(real)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return real(*args, **kwargs)
            return wrapper(real, *args, **kwargs)

        def restore() -> None:
            if getattr(place, name) is replaced:  # else somebody has wrapped it since, and still calls ours
                setattr(place, name, real)

        setattr(place, name, replaced)
        self._undo.append(restore)

    def remove(self) -> None:
        """End the current step and take every hook away."""
        self._wants_norm = self.automatic = False
        self._thread = -1  # a wrapper that somebody has wrapped in turn passes everything on from here on
        for undo in reversed(self._undo):
            with failing_open("attach.remove"):
                undo()
        self._undo.clear()

    # ---- steps ----

    def begin(self, start_ns: int = 0) -> None:
        """Something is done for a step: the next one begins if the last one was taken."""
        if not self.automatic or (self._in_step and not self._taken_ns):
            return
        now = start_ns or _monotonic_ns()
        self.end(now)
        self._number += 1
        self.recorder.begin_step(self._number, now)
        self.began()

    def began(self) -> None:
        """A step has begun, by us or by the loop itself."""
        self._compilation.hook()
        self._in_step, self._taken_ns, self._microbatch, self._logged, self._norm = True, 0, 0, False, None
        self._tokens = 0
        self._losses.clear()

    def end(self, end_ns: int = 0) -> None:
        """Complete the current step, if there is one."""
        if not self._in_step:
            return
        self._in_step = False
        self.settle()
        self.recorder.end_step(end_ns)
        self.values.flush()

    def end_last(self) -> None:
        """There is no further step: the last one ended with its update."""
        if self.automatic:
            self.end(self._taken_ns)

    def settle(self) -> None:
        """Write the loss and the tokens of the step, unless the loop has logged its own."""
        if self._tokens > 0:
            self.values.put(tokens=self._tokens)
        if self._losses and not self._logged:
            own: float | Tensor = sum(self._losses[1:], self._losses[0])
            self.values.put(loss=own, local_loss=own)
        self._losses.clear()

    def log(self, /, **values: float | Tensor) -> None:
        """Columns of the current step, and scalars of the user's own."""
        if "loss" in values:
            self._logged = True
            values.setdefault("local_loss", values["loss"])
        if "tokens" in values:
            self._tokens = _LOGGED
        self.values.put(**values)

    # ---- hooks ----

    def is_in(self, kind: str) -> bool:
        """Return True inside a phase of this kind."""
        return kind in self._open

    def enter(self, kind: str, microbatch: int = -1) -> None:
        """Begin a phase."""
        span = self.recorder.span(kind, microbatch=microbatch) if microbatch >= 0 else self.recorder.span(kind)
        span.__enter__()
        self._open[kind] = span

    def leave(self, kind: str) -> None:
        """End a phase, if it was begun."""
        span = self._open.pop(kind, None)
        if span is not None:
            span.__exit__(None, None, None)

    def before_forward(self, module: nn.Module, args: Any = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """A model is called."""
        if torch.compiler.is_compiling() or get_ident() != self._thread:
            return
        try:
            self._depth += 1
            if self._depth > 1:
                return
            if torch.is_grad_enabled() and module.training:
                self.begin()
                if self._tokens >= 0 and id(module) in self._language_models:
                    self._tokens += num_tokens(args, kwargs)
                self.enter("forward", self._microbatch)
            else:
                self.enter("evaluate")
        except Exception as error:
            record_error("attach.forward", error)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self._thread:
            return
        try:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self.leave("forward")
                self.leave("evaluate")
        except Exception as error:
            record_error("attach.forward", error)

    def _backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "backward" in self._open:
            return real(*args, **kwargs)
        try:
            self.begin()
            self.enter("backward", self._microbatch)
        except Exception as error:
            record_error("attach.backward", error)
        try:
            return real(*args, **kwargs)
        finally:
            try:
                self.leave("backward")
                self._microbatch += 1
                root = args[0] if args else kwargs.get("tensors")
                if isinstance(root, Tensor) and root.numel() == 1 and not self._logged:
                    is_plain = type(root) is Tensor and root.is_cpu  # nothing to wait for, and no tensor of ours
                    self._losses.append(root.item() if is_plain else root.detach().reshape(()))
            except Exception as error:
                record_error("attach.backward", error)

    def _fetch(self, real: Callable[..., Any], iterator: Any) -> Any:
        recorder, begins = self.recorder, self.automatic and (self._taken_ns > 0 or not self._in_step)
        if "data" in self._open:
            return real(iterator)
        before, start_ns = recorder.step_number, _monotonic_ns()
        try:
            if begins:
                recorder.step_number = self._number + 1  # a fetch that never ends is on record as the next step's
            self.enter("data")
        except Exception as error:
            record_error("attach.data", error)
        fetched = False
        try:
            batch = real(iterator)
            fetched = True
            return batch
        finally:
            try:
                recorder.step_number = before
                if fetched and begins:
                    self.begin(start_ns)
                self.leave("data")
            except Exception as error:
                record_error("attach.data", error)

    def _total_norm(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = real(*args, **kwargs)
        if isinstance(norm, Tensor) and not hasattr(norm, "_local_tensor"):  # of shards it is a part of the whole
            self._norm = norm.detach()
        return norm

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure computes the gradients inside `step`, as Lightning and L-BFGS do: the update begins after it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.before_update(optimizer)
            return None

        def before_the_update(*its: Any, **named: Any) -> Any:
            if "optimizer" in self._open:  # it is called more than once
                self.leave("optimizer")
            result = closure(*its, **named)
            self.before_update(optimizer)
            return result

        if len(args) > 1:
            return (args[0], before_the_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": before_the_update}

    def before_update(self, optimizer: Any, *unused: Any) -> None:
        """An optimizer's step begins."""
        if get_ident() != self._thread:
            return
        try:
            if optimizer is self.leader:
                self.begin()
            self.enter("optimizer")
            if optimizer is self.leader:
                self._measure_gradients()
        except Exception as error:
            record_error("attach.optimizer", error)

    def after_update(self, optimizer: Any, *unused: Any) -> None:
        """An optimizer's step is over: with the leader's, what the loop's step is for."""
        if get_ident() != self._thread:
            return
        try:
            self.leave("optimizer")
            if optimizer is not self.leader:
                return
            groups = getattr(optimizer, "param_groups", None)
            rate = {"lr": float(groups[0]["lr"])} if groups and "lr" in groups[0] else {}
            self.recorder.log(committed=True, **rate)
            self._taken_ns = _monotonic_ns()
            while self.at_first_update:
                self.at_first_update.pop()()
        except Exception as error:
            record_error("attach.optimizer", error)

    def refused(self) -> None:
        """The step ends here, without an update: its gradients are as they were refused."""
        self._measure_gradients()
        self.recorder.log(committed=False)
        self._taken_ns = _monotonic_ns()

    def _measure_gradients(self) -> None:
        """The norm as it was clipped, or our own of gradients that are whole; each gradient at an interval."""
        if self.gradients is None:
            return
        step, norm, is_whole = self.recorder.step_number, self._norm, True
        self.gradients.after_backward(step)
        if norm is None and self._wants_norm:
            norm, is_whole = self.gradients.norm()
        number = norm.item() if norm is not None and norm.is_cpu else None
        if norm is not None and is_whole:
            self.values.put(grad_norm=norm if number is None else number)
        if number is not None and math.isfinite(number):
            self._examined = 0
        elif number is not None and self._examined < MAX_EXAMINED:
            self._examined += 1
            self.recorder.log(nonfinite_count=sum(count for _, count in self.gradients.examine(step)))
