"""Inject faults into a rank of a user's script, through torch hooks.

    inject(os.environ[VARIABLE])       # in a drill's rank, after `rankscope` has attached and before the script runs

Its hooks on the model and the optimizer run before or after those of `rankscope.attach`, so that a delay falls in the
intended phase or gap. If the script has no such place (no data loader, no save), nothing is injected and no event is
written. The event `fault_injected` comes before the fault.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..tape import event_kinds
from ..torch_compat import SAVE, SINGLE_PROCESS_LOADER_ITERATOR, tree_leaves, tree_map
from .attach import Attached, current
from .injected_fault import InjectedFault
from .loop.updates import parameters_of

__all__ = ["hold_gil", "inject"]

_MUTEX_BYTES = 64  # a pthread_mutex_t has 40 on x86-64 and 48 on ARM; a mutex of zeros is unlocked
LEAKED_BYTES = 4 << 20
MAX_MODELS = 8
SAVE_S = 1.0


def inject(text: str) -> Callable[[], None]:
    """Prepare this rank for the faults in `text`, separated by `;`. Returns a function that undoes it."""
    attached = current()
    if attached is None or attached.run_dir is None:
        return lambda: None
    injections = [_Injection(InjectedFault.parse(part), attached) for part in text.split(";")]
    for injection in injections:
        injection.arm()

    def undo() -> None:
        for injection in injections:
            injection.undo()

    return undo


class _Injection:
    def __init__(self, fault: InjectedFault, attached: Attached) -> None:
        self._fault = fault
        self._attached = attached
        self._recorder = attached.recorder
        self._is_recorded = False
        self._has_acted = False
        self._model: nn.Module | None = None
        self._in_eval_mode: list[nn.Module] = []  # called with gradients enabled, outermost first
        self._optimizer: Any = None
        self._leaked: list[Tensor] = []
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Remove process-wide hooks; hooks on a model or an optimizer disappear with it."""
        while self._undo:
            self._undo.pop()()

    def arm(self) -> None:
        """Hook the objects that the script will create."""
        if self._fault.rank != self._recorder.rank:
            return
        self._finder = register_module_forward_pre_hook(self._find_model)
        self._undo.append(self._finder.remove)
        self._undo.append(register_optimizer_step_post_hook(self._find_in_eval_mode).remove)
        name = self._fault.name
        if name in ("slow_before_optimizer", "garbage"):
            self._undo.append(register_optimizer_step_pre_hook(lambda *unused: self._delay()).remove)
        elif name == "slow_after_optimizer":
            self._undo.append(register_optimizer_step_post_hook(lambda *unused: self._delay()).remove)
        elif name == "slow_optimizer":
            self._undo.append(register_optimizer_step_pre_hook(self._find_optimizer).remove)
        elif name == "slow_data":
            self._slow_loader()
        elif name == "slow_disk":
            self._slow_saves()

    # ---- when ----

    def _is_due(self) -> bool:
        """Return True if the fault acts now. A lasting fault acts in each step of its range. Every other fault acts
        once.

        The first time, writes the event.
        """
        if self._has_acted or not self._fault.step <= self._recorder.step_number <= self._fault.until:
            return False
        self._has_acted = not self._fault.lasts
        if not self._is_recorded:
            self._is_recorded = True
            self._recorder.event(
                event_kinds.FAULT_INJECTED, fault=self._fault.name, parameters={"seconds": self._fault.seconds}
            )
        return True

    def _delay(self) -> None:
        if not self._is_due():
            return
        until = time.monotonic() + self._fault.seconds
        if self._fault.name == "garbage":
            while time.monotonic() < until:
                gc.collect()
        elif self._fault.name == "busy_forward":
            matrix = torch.ones(64, 64)
            while time.monotonic() < until:
                matrix @ matrix
        else:
            time.sleep(self._fault.seconds)

    # ---- where ----

    def _find_model(self, module: nn.Module, args: Any) -> None:
        """Find the outermost module that trains when it is called."""
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        if module.training:
            self._hook_model(module)
        elif len(self._in_eval_mode) < MAX_MODELS:
            self._in_eval_mode.append(module)

    def _find_in_eval_mode(self, optimizer: Any, *unused: Any) -> None:
        """If no model has been found, take the first module called in eval mode that this optimizer updates."""
        updated = parameters_of(optimizer)
        called, self._in_eval_mode = self._in_eval_mode, []
        for module in called:
            if self._model is None and any(id(parameter) in updated for parameter in module.parameters()):
                self._hook_model(module)

    def _hook_model(self, module: nn.Module) -> None:
        """Hook the model. The hooks act at its next call and later."""
        self._finder.remove()
        self._model = module
        name = self._fault.name
        if name == "slow_batch":
            module.register_forward_pre_hook(lambda *unused: self._delay(), prepend=True)
        elif name in ("slow_forward", "busy_forward"):
            module.register_forward_pre_hook(lambda *unused: self._delay())
        elif name == "slow_after_forward":
            module.register_forward_hook(lambda *unused: self._delay())
        elif name == "slow_backward":
            module.register_forward_hook(self._hook_output)
        elif name in ("nan_batch", "inf_batch"):
            module.register_forward_pre_hook(self._poison, with_kwargs=True)
        elif name in _ACTIONS:
            module.register_forward_pre_hook(self._act, prepend=True)

    def _find_optimizer(self, optimizer: Any, *unused: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            optimizer.register_step_pre_hook(lambda *unused: self._delay())

    def _hook_output(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = _first_tensor(output, lambda found: found.requires_grad)
        if tensor is not None:
            tensor.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, gradient: Tensor) -> Tensor:
        self._delay()
        return gradient

    def _poison(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        bad = float("nan") if self._fault.name == "nan_batch" else float("inf")
        floating = _first_tensor((args, kwargs), Tensor.is_floating_point)
        if floating is None:
            embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
            if embedding is not None and self._is_due():
                hooks: list[Any] = []  # the handle of the hook: the hook removes itself with it
                hooks.append(embedding.register_forward_hook(lambda *call: _spoiled(call[2], bad, hooks)))
            return None
        if not self._is_due():
            return None
        spoiled = _spoiled(floating, bad)
        return tree_map(lambda value: spoiled if value is floating else value, (args, kwargs))

    def _act(self, module: nn.Module, args: Any) -> None:
        if self._fault.name == "skip_collective" and not getattr(module, "require_backward_grad_sync", True):
            return  # under `no_sync`, this microbatch has no reduction that could be skipped
        if self._fault.name == "memory":
            if self._is_due():
                self._leaked.append(torch.ones(LEAKED_BYTES, dtype=torch.uint8))
        elif self._is_due():
            _ACTIONS[self._fault.name](module)

    def _slow_loader(self) -> None:
        """Delay the fetch inside the wrapper of `attach`, so that the delay is recorded."""
        base = SINGLE_PROCESS_LOADER_ITERATOR
        real = base._next_data

        def slow(iterator: Any) -> Any:
            self._delay()
            return real(iterator)

        self._undo.append(lambda: setattr(base, "_next_data", real))
        base._next_data = slow

    def _slow_saves(self) -> None:
        place, name = SAVE
        real: Any = getattr(place, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            if self._is_due():
                time.sleep(SAVE_S)
            return real(*args, **kwargs)

        self._undo.append(lambda: setattr(place, name, real))
        setattr(place, name, slow)


def hold_gil() -> None:
    """Deadlock in native code with the GIL held: lock a mutex twice through PyDLL, which does not release the GIL."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(_MUTEX_BYTES)
    lock(mutex)
    lock(mutex)


def _raise(module: nn.Module) -> None:
    raise ValueError("injected fault: a bad sample")


def _sleep_forever(module: nn.Module) -> None:
    while True:
        time.sleep(1.0)


def _other_size(module: nn.Module) -> None:
    device = next(module.parameters()).device
    dist.all_reduce(torch.ones(7, device=device))


def _leave_out(module: nn.Module) -> None:
    """Skip DDP's reductions in this step's backward pass. Without DDP, skip the script's next all-reduce."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = False
        hooks: list[Any] = []

        def reduce_again(*unused: object) -> None:
            module.require_backward_grad_sync = True
            hooks.pop().remove()

        # Undo the change right after the step. Later, a loop with accumulation sets the attribute itself.
        hooks.append(register_optimizer_step_post_hook(reduce_again))
        return
    real = dist.all_reduce

    def left_out(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        dist.all_reduce = real

    dist.all_reduce = left_out


_ACTIONS: dict[str, Callable[[nn.Module], None]] = {
    "kill": lambda module: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda module: os._exit(0),
    "exception": _raise,
    "hang": _sleep_forever,
    "stop": lambda module: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda module: hold_gil(),
    "wrong_size": _other_size,
    "skip_collective": _leave_out,
    "memory": lambda module: None,
}


def _spoiled(tensor: Tensor, value: float, hooks: Sequence[Any] = ()) -> Tensor:
    for hook in hooks:
        hook.remove()
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = value
    return spoiled


def _first_tensor(value: Any, wanted: Callable[[Tensor], bool]) -> Tensor | None:
    leaves = tree_leaves(value)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and wanted(leaf)), None)
