"""Attach to an unmodified script before it starts, and find the model and optimizer that train.

    auto_attach()                            # then run the script

Recording of process groups starts at once. The model is found when it is called: it is the outermost module with
trainable parameters that is called with gradients enabled. The optimizer is found at its first step. From then on the
process is set up as by `attach(model, optimizer)`, and the global hook that looked for the model is removed. If an
optimizer has unknown parameters, all live objects are searched for its models, because no hook runs for a loop that
calls `model.forward` directly.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..fail_open import failing_open
from ..torch_compat import between_graphs
from .attach import Attached, attach
from .loop.evaluations import is_in_training_mode
from .loop.updates import parameters_of, unwrapped
from .loop.weak_objects import WeakObjects

__all__ = ["auto_attach"]

MAX_MODELS = 8
MAX_SEARCHES = 4
"""Maximum searches of all live objects, because a loop may make an optimizer per task."""


def auto_attach(*, name: str = "", **options: Any) -> Attached:
    """Attach now, and hook the script's models and optimizers when they appear. Options as for `attach`."""
    attached = attach(name=name or os.environ.get("RANKSCOPE_RUN_NAME", ""), **options)
    if attached.run_dir is not None:
        with failing_open("attach.unattended"):
            _Search(attached)
    return attached


class _Search:
    """Searches for the model and optimizer that are trained, until the first step and again for each new optimizer."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._inside = WeakObjects()  # submodules of the models found so far; these are not models themselves
        self._num_models = 0
        self._num_searches = 0
        self._module_hook = register_module_forward_pre_hook(self._before_forward)
        # Stays until `detach`, because torch iterates over these hooks while they run. It costs one call per step.
        hook = between_graphs(self._before_optimizer_step, left_out=self._updated_in_graph)
        optimizer_hook = register_optimizer_step_pre_hook(hook)
        self._has_stepped = False
        attached.at_detach(lambda: self._module_hook.remove())
        attached.at_detach(optimizer_hook.remove)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module in self._inside or torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() or not is_in_training_mode(module) or self._num_models >= MAX_MODELS:
            return
        if not self._attached.is_in_loop():
            return
        with failing_open("attach.unattended"):
            if any(parameter.requires_grad and not parameter.is_meta for parameter in module.parameters()):
                self._num_models += 1
                for part in module.modules():
                    self._inside.add(part)
                if self._attached.watches(module):  # already watched by the script's own attach call or callback
                    return
                self._attached.watch([module])
                self._attached.called(module, args)  # this call began before the hooks were set, so record it here

    def _before_optimizer_step(self, optimizer: Any, *unused: Any) -> None:
        """Runs before the optimizer's own step hooks. Each update by the first optimizer ends a step of the loop."""
        if self._attached.is_in_loop():
            is_new = not self._attached.watches(unwrapped(optimizer))
            is_another = self._has_stepped and is_new
            # Keep the hook in a first step without a known model: the step's closure may call the model.
            if self._num_models or self._has_stepped:
                self._module_hook.remove()
            if is_another:  # this optimizer may belong to another training loop
                self._num_models = 0
                self._module_hook = register_module_forward_pre_hook(self._before_forward)
            if is_new:
                with failing_open("attach.unattended"):
                    self._search_models(optimizer)
            self._has_stepped = True
            self._attached.watch([], [optimizer], leads=False)

    def _updated_in_graph(self) -> None:
        if (phases := self._attached._phases) is not None:
            phases.updated_in_graph()

    def _search_models(self, optimizer: Any) -> None:
        """Watch the models of an optimizer with unknown parameters. Slow, so done at most `MAX_SEARCHES` times."""
        if self._num_searches < MAX_SEARCHES:
            known = {id(parameter) for parameter in self._attached.parameters}
            if parameters_of(optimizer) - known:
                self._num_searches += 1
                self._attached.watch(_models_of(optimizer))


def _models_of(optimizer: Any) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of this optimizer. Searches all live objects: slow."""
    updated = parameters_of(optimizer)
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in vars(one)]
    outer = {id(child): module for module in modules for child in module._modules.values()}
    found = WeakObjects()
    for module in modules:
        if any(id(parameter) in updated for parameter in module._parameters.values()):
            inside: set[int] = set()  # modules seen so far, since a module may contain itself
            while id(module) in outer and id(module) not in inside:
                inside.add(id(module))
                module = outer[id(module)]
            found.add(module)
    return list(found)
