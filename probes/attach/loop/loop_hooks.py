"""Steps and phases of an unmodified loop, from torch hooks.

    phases = LoopPhases(recorder, values)
    phases.watch_model(model)
    phases.watch_optimizer(optimizer)
    phases.patch()                           # hooks that all models share: backward, data loaders, clipping
    phases.remove()                          # restore every patched function and hook

A step begins with its first activity (fetching a batch, a forward or a backward pass) and lasts until the first
activity of the next step. `optimizer.step` marks the boundary. Several backward passes before it belong to one step.
Logging or evaluation after it still belongs to that step (`fetches`). One of several optimizers leads (`updates`).

    data        a batch is fetched from a `torch.utils.data.DataLoader`
    forward     the model is called with gradients on, or in training mode without gradients before the step's update
    evaluate    other calls, and calls of a copy or a part of the model between updates (`evaluations`)
    backward    `loss.backward()`; the scalar it is called on counts as the loss if none is logged
    optimizer   `optimizer.step()`
    checkpoint  a save by torch, safetensors or torch.distributed.checkpoint (`saves`)
    generation, reward, environment, ...  before reinforcement learning trains (`trl_phases`, `environment_phases`)

One thread is observed: the one that attached, or the one in which the loop turns out to run. Threads that take turns at
an optimizer's updates, each with its own batch, are one loop.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from time import monotonic_ns as _monotonic_ns
from typing import Any

import torch
from torch import Tensor, nn

from ...collectives.gradients.model_hook import ModelHook, script_without_hooks, without_hooks
from ...collectives.wrapped import training_is_here
from ...compilation import CompileProbe
from ...fail_open import failing_open, record_error
from ...recorder import Recorder
from ...step_scalars import StepScalars
from ...torch_compat import run_uncompiled
from ..patching.on_import import OnImport
from ..patching.replaced import replaced
from .environment_phases import ENVIRONMENT, EnvironmentPhases
from .evaluations import EvalModeTraining, Evaluations, inner_modules, is_in_training_mode
from .fetches import Fetches
from .loss_scaling import LossScaling
from .saves import Saves
from .step_losses import StepLosses
from .step_method import around_step, hook_step
from .step_norms import StepNorms
from .trl_phases import TrlPhases
from .update_line import Frames, UpdateLine
from .updates import Updates, parameters_of, unwrapped
from .weak_objects import WeakObjects, WeakReference

__all__ = ["LoopPhases"]

_NO_THREAD = -1
_SAMPLING = frozenset(("generation", ENVIRONMENT))
"""Phases in which a forward pass without gradients generates or scores samples, and is not an evaluation."""
_NOTHING: Mapping[str, Any] = {}


class LoopPhases:
    """The hooks of one recorder."""

    leader = WeakReference(at_end=lambda phases: phases.norms.free())  # the optimizer whose step ends the loop's step

    def __init__(self, recorder: Recorder, values: StepScalars, *, gradient_norm: bool = True) -> None:
        self.recorder = recorder
        self.values = values
        self.norms = StepNorms(recorder, values, is_wanted=gradient_norm)
        self.automatic = True  # the optimizer's step ends the loop's steps; False: the loop marks them itself
        self.thread = get_ident()  # the thread in which the loop runs
        self._learners: set[int] = set()  # threads that take turns at the leader's updates
        self._undo: list[Callable[[], object]] = []
        self._watched = WeakObjects()
        self.num_updates = 0  # number of steps of the leader
        self._open: dict[str, Any] = {}  # kind -> span
        self._depth = 0  # number of nested model calls
        self._number, self._microbatch, self._in_step = 0, 0, False
        self._updated_ns = 0  # time at which the current step's update ended, or the last phase after the update
        self._imports, self._scaling = OnImport(), LossScaling(self)
        self._losses = StepLosses(values, self._scaling)
        self._updates = Updates(recorder)
        self._fetches = Fetches(self, self._updates, self._losses)
        self._evaluations = Evaluations(self)
        self.in_eval_mode = EvalModeTraining()
        self._update_line = UpdateLine()
        self.at_training = self._updates.at_training
        self.at_first_update: list[Callable[[], None]] = []  # called once, when all models and optimizers exist
        self._compilation = CompileProbe(recorder)

    # ---- models, optimizers and functions to hook ----

    def watch_model(self, model: nn.Module) -> None:
        """Time the calls of `model`: the outermost module, as the loop calls it."""
        self._compilation.hook()
        if not self._watched.add(model):
            return
        self._losses.watch(model)
        if self._losses.has_trained:
            self.in_eval_mode.add(model)
        self._undo.append(self.norms.input_gradient.watch(model))
        for called in inner_modules(model):
            before, after = ModelHook(called, self.before_forward), ModelHook(called, self.after_forward)
            self._undo.append(called.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            self._undo.append(called.register_forward_hook(after, always_call=True).remove)

    def watch_optimizer(self, optimizer: Any, *, leads: bool = True) -> None:
        """Time `step` of a torch optimizer, or of a wrapper that has a `step` method. With `leads`, its updates end the
        loop's steps from now on. Otherwise they do so only while there is no leader."""
        inner = unwrapped(optimizer)
        if leads or self.leader is None:
            self.leader = inner
        if not self._watched.add(inner):
            return
        if isinstance(inner, torch.optim.Optimizer):
            with contextlib.suppress(AttributeError):  # raised by a wrapper that does not initialise its base class
                self._undo += hook_step(inner, self)
                return
        self._undo.append(around_step(inner, self.before_update, self.after_update))

    def watches(self, watched: object) -> bool:
        """Return True for a model or optimizer that is hooked."""
        return watched in self._watched

    def patch(self) -> None:
        """Observe every backward pass, data loader and clipping of this thread, and compilations by torch."""
        self._compilation.hook()
        self._undo.append(self._compilation.remove)
        self.replace(torch.autograd, "backward", self._backward, follows=True)
        run_uncompiled(torch.autograd.backward)
        self._fetches.patch()
        self._undo.append(replaced(torch.jit, "script", script_without_hooks))
        self._undo.append(replaced(torch.cuda, "make_graphed_callables", without_hooks))
        for library in (Saves(self), TrlPhases(self), self._scaling):
            library.patch(self._imports)
        self.norms.patch(self, self._imports)
        self._undo += EnvironmentPhases(self).patch(self._imports)
        self._undo.append(self._imports.remove)

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any], *, follows: bool = False) -> None:
        """Until `remove`, replace a function in the loop's thread by `wrapper(real, ...)`. `follows`: a call shows in
        which thread the loop runs."""

        def applies() -> bool:
            return not torch.compiler.is_compiling() and (get_ident() == self.thread or (follows and self.follows()))

        self._undo.append(replaced(place, name, wrapper, applies=applies))

    def remove(self) -> None:
        """End the current step and remove all hooks."""
        self.norms.is_wanted = self.automatic = False
        self._evaluations.are_over()
        self.thread = _NO_THREAD  # a wrapper that other code has wrapped again only passes calls on from now on
        for undo in reversed(self._undo):
            with failing_open("attach.remove"):
                undo()
        self._undo.clear()

    # ---- steps ----

    def begin(self, start_ns: int = 0) -> None:
        """Note activity of a step: it begins the next step if the optimizer has completed the last one."""
        if not self.automatic or (self._in_step and not self._updated_ns) or self._updates.awaits_others:
            return
        now = start_ns or _monotonic_ns()
        self.end(now)
        self._number += 1
        self.recorder.begin_step(self._number, now)
        self.step_began()

    @property
    def next_step(self) -> int:
        """Number of the step to which the next activity belongs, by the optimizer's updates."""
        begins = self.automatic and (self._updated_ns > 0 or not self._in_step)
        return self._number + 1 if begins else self.recorder.step_number

    def models(self, updated_by: Any = None) -> list[nn.Module]:
        """Return the watched models, or only the ones that an optimizer updates."""
        found = [watched for watched in self._watched if isinstance(watched, nn.Module)]
        updated = parameters_of(updated_by)
        return [one for one in found if updated_by is None or any(id(each) in updated for each in one.parameters())]

    def follows(self, updates: Any = None) -> bool:
        """Move to this thread if the loop has not begun, its thread has ended, or both take turns. True if moved."""
        if self.thread == _NO_THREAD:
            return False
        if self.recorder.step_number > 0 and self.thread in threading._active:  # type: ignore[attr-defined]
            if updates is not None and updates is self.leader:
                self._learners |= {self.thread, get_ident()}
            if get_ident() not in self._learners or not self._updated_ns:
                return False
        for kind in [*self._open]:  # phases that are still open in the thread that is left
            self.leave(kind)
        self.thread, self._depth = get_ident(), 0
        training_is_here()
        return True

    def is_here(self, *, trains: bool, updates: Any = None) -> bool:
        """Return True in the loop's thread. `trains`: the caller trains, so `follows(updates)` decides elsewhere."""
        return get_ident() == self.thread or (trains and self.follows(updates))

    def step_began(self) -> None:
        """Note that a step has begun, through the hooks or marked by the loop."""
        self._compilation.hook()
        self._evaluations.are_over()
        self._in_step, self._updated_ns, self._microbatch = True, 0, 0
        self.norms.step_began()
        self._losses.step_began()

    def _training_begins(self, models: Iterable[Any]) -> None:
        """Handle the start of a training pass."""
        self._note_update_by_hand(models)
        self.leave(ENVIRONMENT)
        self._fetches.model_called(trains=True)
        self.begin()

    def _note_update_by_hand(self, models: Iterable[Any]) -> None:
        """Note the step's update if the loop has updated one of these models by hand."""
        if self.leader is None and any(map(self._updates.was_by_hand, models)):
            self.recorder.log(committed=True)
            self._update_made()

    def failed(self, frames: Frames) -> None:
        """Note an exception in these frames; it counts for the next step if their lines show that it had begun."""
        if self._in_step and self._updated_ns and not self._open and self._update_line.is_followed_by(frames):
            self.begin()
        self._losses.failed(frames)

    def end(self, end_ns: int = 0) -> None:
        """Complete the current step, if there is one."""
        if not self._in_step:
            return
        self.leave(ENVIRONMENT)
        self.leave("optimizer")
        self._in_step = False
        with failing_open("attach.loss"):
            self.settle()
        self.recorder.end_step(end_ns)
        self.values.flush()

    def end_last(self) -> None:
        """End the last step at its update, or at the end of an evaluation or save that followed it."""
        if not self.automatic:
            return
        self._note_update_by_hand(self.models() or self._updates.trained_leaves)
        if self._losses.are_finite:  # a loop may have ended because of a NaN
            self._updates.remainder.epoch_ended()
        trained = self._losses.has_trained and not self._updates.remainder.is_left
        if self._in_step and self._number > 1 and not self._updated_ns and not trained:
            self._in_step = False  # this "step" has batches of an evaluation, or too few for an update
            self.recorder.discard_step()
        self.end(self._updated_ns)

    def settle(self) -> None:
        """Write the step's own loss and tokens."""
        if self._updates.are_by_hand:
            self.norms.updated_by_hand()
        self._losses.settle(self.norms.measured)

    def log(self, /, **values: float | Tensor) -> None:
        """Set columns of the current step, and scalars with other names."""
        self._losses.log(**values)

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
        if (span := self._open.pop(kind, None)) is not None:
            span.__exit__(None, None, None)
            if self._updated_ns:
                self._updated_ns = _monotonic_ns()
                self._evaluations.may_begin()

    def before_forward(self, module: nn.Module, args: Any = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """Handle a call of a model."""
        if torch.compiler.is_compiling():
            return
        trains = torch.is_grad_enabled() and self.in_eval_mode.trains(module)
        if not self.is_here(trains=trains):
            return
        try:
            self._depth += 1
            if self._depth > 1 or self.is_in("backward"):  # activation checkpointing computes a pass again
                return
            if trains:
                self._training_begins([module])
                self._losses.forward(module, args, kwargs)
                self.enter("forward", self._microbatch)
            elif not self._open.keys() & _SAMPLING:
                self._fetches.model_called(trains=False)
                is_before_update = is_in_training_mode(module) and self._in_step and not self._updated_ns
                self.enter("forward" if is_before_update else "evaluate")
        except Exception as error:
            record_error("attach.forward", error)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        try:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self.leave("forward")
                self.leave("evaluate")
        except Exception as error:
            record_error("attach.forward", error)

    def _backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "backward" in self._open or getattr(args[0] if args else None, "is_meta", False):
            return real(*args, **kwargs)  # on the meta device nothing is computed: operations are counted
        with failing_open("attach.backward"):
            self._training_begins(() if self.leader else self.models() or self._updates.trained_leaves)
            self._losses.backward(*args, **kwargs)
            self.in_eval_mode.backward_begins()
            self.enter("backward", self._microbatch)
        try:
            return real(*args, **kwargs)
        finally:
            with failing_open("attach.backward"):
                self.leave("backward")
                self._microbatch += 1
                self.norms.backward_ended()
                self._updates.backward_ended(() if self.leader else self.models(), args[0] if args else None)

    def updated_in_graph(self, optimizer: Any = None) -> None:
        """Handle the compilation of a step in which hooks cannot run. If it is the leader's, or nobody leads, the
        loop's steps end where parameters have changed."""
        if get_ident() == self.thread and optimizer is self.leader:
            del self.leader
            self._updates.are_by_hand = True

    def before_update(self, optimizer: Any, *unused: Any) -> None:
        """Handle the start of an optimizer's step."""
        if not self.is_here(trains=True, updates=optimizer):
            return
        with failing_open("attach.optimizer"):
            self.leave(ENVIRONMENT)
            if optimizer is self.leader and self._updates.remainder.is_untouched(num_clips=self.norms.num_clips):
                self._losses.forget_cleared()
            if (leader := self._updates.step_begins(optimizer, self.leader)) is not self.leader:
                if not self._updates.are_partners(leader, self.leader):
                    self._losses.keep_newest()
                self.leader = leader
            if optimizer is self.leader:
                if not self._updates.awaits_others:
                    self._losses.move_to_next_step()
                self.begin()
            elif not self._updates.are_partners(optimizer, self.leader):
                self._losses.set_aside()
            if self._updates.enter_step(optimizer, is_inside=self.is_in("optimizer")):
                self.leave("optimizer")  # the phase is still open if an earlier step raised an exception
                self.enter("optimizer")
            if optimizer is self.leader:
                self.num_updates += 1
                if not self.is_in("backward"):  # in an update within the backward pass, gradients are incomplete
                    self.norms.measure(getattr(optimizer, "grad_scale", None))

    def after_update(self, optimizer: Any, *unused: Any) -> None:
        """Handle the end of an optimizer's step; the leader's completes the loop's step."""
        if get_ident() != self.thread:
            return
        with failing_open("attach.optimizer"):
            if self._updates.leave_step(optimizer):
                self.leave("optimizer")
            if optimizer is not self.leader:
                return
            groups = getattr(optimizer, "param_groups", None)
            rate = {"lr": groups[0]["lr"]} if groups and "lr" in groups[0] else {}
            overflowed = getattr(optimizer, "found_inf", None)  # a fused optimizer then skips the update
            self.values.put(committed=overflowed == 0 if isinstance(overflowed, Tensor) else True, **rate)
            self._update_line.made(sys._getframe(1))
            self._update_made()

    def _update_made(self) -> None:
        """Handle the step's update."""
        self._updated_ns = _monotonic_ns()
        self._losses.updated(may_go_on=self._updates.made())
        self._evaluations.may_begin()
        while self.at_first_update:
            self.at_first_update.pop()()

    def refused(self, *, are_gone: bool = False) -> None:
        """End the step without an update, with the gradients that were refused. `are_gone`: the loop cleared them."""
        (self.norms.updated_by_hand if are_gone else self.norms.measure)()
        self.recorder.log(committed=False)
        self._updated_ns = _monotonic_ns()
