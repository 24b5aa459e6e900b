"""Faults of a process: it dies, stops, hangs, or allocates more memory than exists. They strike when a batch is
requested, `hang` after the forward pass.

ARM["kill"](trigger, training)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from probes.attach.injection import hold_gil
from probes.tape import event_kinds
from trainer.checkpoint import attempt_fence as fence
from trainer.faults.injectors.numeric import arm_nan_grad
from trainer.faults.options import Fault
from trainer.faults.trigger import FaultyLoader, Trigger, in_training
from trainer.training.rank_training import Training

__all__ = ["ARM"]

_HEADROOM_BYTES = 64 << 20
_LATE_S = 60.0


def _arm_act(trigger: Trigger, training: Training) -> None:
    class Acting(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                _ACTIONS[trigger.fault.kind](trigger.fault)

    Acting(training)


def _stop(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(fault: Fault) -> None:
    os._exit(1)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"injected fault: exception at step {fault.step} on rank {fault.rank}")


def _segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def _abort(fault: Fault) -> None:
    os.abort()


def _hold_gil(fault: Fault) -> None:
    hold_gil()


def _exhaust_memory(fault: Fault) -> None:
    """Allocate under an address space limit, so that the rank runs out of memory and not the machine."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    held: list[Any] = []
    try:
        while True:
            held.append(torch.empty(_HEADROOM_BYTES, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # the process needs memory to record its exit


_ACTIONS: Mapping[str, Callable[[Fault], None]] = {
    "stop": _stop,
    "kill": _kill,
    "exit": _exit,
    "exception": _raise,
    "segfault": _segfault,
    "abort": _abort,
    "gil": _hold_gil,
    "oom": _exhaust_memory,
}


def _arm_hang(trigger: Trigger, training: Training) -> None:
    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if in_training(module) and trigger.due():
            _sleep_for_ever()

    training.modules[-1].register_forward_hook(after_forward)


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(1.0)


def _arm_kill_in_recovery(trigger: Trigger, training: Training) -> None:
    """Produce a NaN, and kill the process when the rank has recorded it and starts to roll back."""
    arm_nan_grad(trigger, training)
    record = trigger.recorder.event

    def record_and_kill(kind: str, **detail: Any) -> None:
        record(kind, **detail)
        if kind == event_kinds.NONFINITE and trigger.firing:
            _kill(trigger.fault)

    trigger.recorder.event = record_and_kill  # type: ignore[method-assign]


def _arm_late_writer(trigger: Trigger, training: Training) -> None:
    """Kill the rank, but leave a forked copy of the process. The launcher does not know the copy, which writes after
    its attempt is over."""

    class Dying(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                if os.fork() == 0:
                    _write_late(trigger)
                _kill(trigger.fault)

    Dying(training)


def _write_late(trigger: Trigger) -> NoReturn:
    try:
        _close_connections()  # so that the other ranks see the connection break
        deadline = time.monotonic() + _LATE_S
        while max(fence.claims(trigger.run)) <= fence.held_attempt() and time.monotonic() < deadline:
            time.sleep(0.05)
        path = trigger.run.checkpoints / "ledger.json"
        late = fence.scratch(path)
        late.write_text("{}")
        fence.check()
        late.rename(path)  # `write_json`, too, renames right after the check
    except fence.Fenced as fenced:
        trigger.recorder.event(event_kinds.FENCED, newest_attempt=fenced.newest)
    finally:
        os._exit(0)


def _close_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    **dict.fromkeys(_ACTIONS, _arm_act),
    "hang": _arm_hang,
    "kill_in_recovery": _arm_kill_in_recovery,
    "late_writer": _arm_late_writer,
}
