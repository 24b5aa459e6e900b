"""Evaluations that do not call the trained module itself, but its inner module, a wrapper around it, or a copy.

    evaluations = Evaluations(phases)
    evaluations.may_begin()         # the step's update is made
    evaluations.are_over()          # training goes on
    modes = EvalModeTraining()
    modes.trains(model)             # a call with gradients enabled: True if it belongs to training
    modes.backward_begins()         # a backward pass begins

A loop that trains `DistributedDataParallel(task)` evaluates `task.model`, what `accelerator.unwrap_model` returns, or a
moving average of the weights. Such a module is recognised by a parameter that it shares with the trained one, or by
parameters of the same shapes in the same order. It is found by torch's global module hook. Since that costs time in
each call of each module, the hook is installed only between an update and the next training activity, outside of the
outermost call. Compiled models get no hook, because torch warns about global ones.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Size, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ...collectives.gradients.model_hook import ModelHook
from ...fail_open import record_error
from .weak_objects import WeakObjects

__all__ = ["EvalModeTraining", "Evaluations", "inner_modules", "is_in_training_mode", "main_parts"]


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    thread: int

    def models(self) -> list[nn.Module]: ...

    def before_forward(self, module: nn.Module) -> None: ...

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None: ...


class Evaluations:
    """Calls between updates, in one loop."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._related = WeakObjects()
        self._others = WeakObjects()
        self._called = WeakObjects()  # modules that were called since the update and have been given a hook
        self._undo: list[Callable[[], None]] = []
        self._global: Any = None  # handle of the hook of all modules

    def may_begin(self) -> None:
        """Note that the step's update, or a part of an evaluation after it, is over."""
        if self._global is None and not any(map(_is_compiled, self._phases.models())):
            self._global = register_module_forward_pre_hook(self._before)

    def are_over(self) -> None:
        """Note that training continues, or recording ends."""
        self._unhook()
        if self._undo:
            self._called = WeakObjects()
            while self._undo:
                self._undo.pop()()

    def _unhook(self) -> None:
        if self._global is not None:
            self._global.remove()
            self._global = None

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self._phases.thread:
            return
        try:
            if (torch.is_grad_enabled() and is_in_training_mode(module)) or not self._is_related(module):
                return
            self._unhook()  # remove the global hook, because modules called by this one belong to the same evaluation
            if any(module is inner for model in self._phases.models() for inner in inner_modules(model)):
                return  # this module has permanent hooks already
            # This hook is removed only when training continues, because torch iterates over a module's hooks during the
            # call.
            if self._called.add(module):
                after = ModelHook(module, self._phases.after_forward)
                self._undo.append(module.register_forward_hook(after, always_call=True).remove)
            self._phases.before_forward(module)
        except Exception as error:
            record_error("attach.evaluation", error)

    def _is_related(self, module: nn.Module) -> bool:
        if module in self._related or module in self._others:
            return module in self._related
        parameters = list(module.parameters())
        if not parameters:
            return False
        models = self._phases.models()
        trained = {id(parameter) for model in models for parameter in model.parameters()}
        is_part = any(id(parameter) in trained for parameter in parameters)
        is_related = is_part or any(_shapes(module) == _shapes(part) for model in models for part in main_parts(model))
        (self._related if is_related else self._others).add(module)
        return is_related


def inner_modules(model: nn.Module) -> list[nn.Module]:
    """Return the model and what it wraps for data parallelism or compilation, which loops call to evaluate."""
    found = [model]
    while (name := _wrapped(found[-1])) in found[-1]._modules:
        found.append(found[-1].get_submodule(name))
    return found


def is_in_training_mode(model: nn.Module) -> bool:
    """Return True if the model, or what it wraps, is in training mode: Lightning sets only the inner module's mode."""
    return model.training or any(one.training for one in inner_modules(model))


def _wrapped(model: nn.Module) -> str:
    return "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"


def main_parts(model: nn.Module) -> list[nn.Module]:
    """Return the model and the modules in it, outermost first, that hold most of the parameters that are trained."""
    found, size = [model], _size(model)
    while main := [child for child in found[-1].children() if _size(child) * 2 > size]:
        found.append(main[0])
    return found


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in inner_modules(model))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _shapes(module: nn.Module) -> list[Size]:
    return [parameter.shape for parameter in module.parameters()]


class EvalModeTraining:
    """Models that a loop trains in eval mode: it fine-tunes without `train()`, or evaluates and never goes back.

    A call in eval mode counts as an evaluation until a backward pass follows it without a call in training mode in
    between. From then on the model's calls train, until it is called in training mode.
    """

    def __init__(self) -> None:
        self._trained = WeakObjects()  # in eval mode
        self._called = WeakObjects()  # in eval mode with gradients, since the last backward pass
        self._has_trained = False  # True if a training pass was called since the last backward pass

    def add(self, model: nn.Module) -> None:
        """Note a model that was found through its optimizer: if it is in eval mode, it was trained in eval mode."""
        if not is_in_training_mode(model):
            self._trained.add(model)

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._trained and not is_in_training_mode(model)

    def trains(self, model: nn.Module) -> bool:
        """Return True if a call with gradients enabled belongs to training."""
        if is_in_training_mode(model):
            self._trained.discard(model)
        elif model not in self._trained:
            self._called.add(model)
            return False
        self._has_trained = True
        return True

    def backward_begins(self) -> None:
        """Note a backward pass. It belongs to the models that were called in eval mode, if none was called in training
        mode."""
        if not self._has_trained:
            for model in self._called:
                self._trained.add(model)
        self._called.clear()
        self._has_trained = False
