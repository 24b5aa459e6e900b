"""Decides when an injected fault strikes: once in a run, at the fault's step. The fault is recorded before it acts.

trigger = Trigger(fault, number, recorder, run, rank)
if trigger.due(): ...                  # True once in a run: a marker on the disk outlives the process
if trigger.lasting(): ...              # from its step to `until`
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.rundir import RunDir
from trainer.data.batches import Batch
from trainer.faults.options import Fault, FaultError
from trainer.training.rank_training import Training

__all__ = ["FaultyLoader", "Trigger", "change_gradient", "in_training"]


class Trigger:
    """Decides whether a fault is due on this rank, and records the fault before it acts.

    `is_target` is False on a rank that only takes part in another rank's fault. Such a rank acts, too, but does not
    record the fault.
    """

    def __init__(
        self, fault: Fault, number: int, recorder: Recorder, run: RunDir, rank: int, *, is_target: bool = True
    ) -> None:
        self.fault = fault
        self.recorder = recorder
        self.run = run
        self.rank = rank
        self.is_target = is_target
        self._marker = run.path / "faults" / f"{number}-{fault.kind}-rank-{rank}"
        self._spent = self._marker.exists()
        self.firing = False

    @property
    def spent(self) -> bool:
        """True if the fault has already struck in this run, possibly in an earlier attempt."""
        return self._spent

    @property
    def step(self) -> int:
        return self.recorder.step_number

    def due(self) -> bool:
        """True at the fault's step, once in a run."""
        if self._spent or self.step != self.fault.step:
            return False
        self.fire()
        return True

    def lasting(self) -> bool:
        """True while a lasting fault is active. The fault begins once in a run, and ends at the step `until`, or else
        with the attempt in which it began."""
        if self.firing:
            return not self.fault.until or self.step <= self.fault.until
        if self._spent or self.step < self.fault.step:
            return False
        self.fire()
        return True

    def fire(self) -> None:
        """Write the marker to disk, then record the event."""
        self._spent = self.firing = True
        self._marker.parent.mkdir(exist_ok=True)
        with self._marker.open("w") as file:
            os.fsync(file.fileno())
        if self.is_target:
            self.report()

    def report(self) -> None:
        self.recorder.event(event_kinds.FAULT_INJECTED, fault=self.fault.kind, parameters=self.fault.parameters())


class FaultyLoader:
    """Wraps the rank's loader, to act before a batch is read or to change the batch.

    The constructor installs the wrapper.
    """

    def __init__(self, training: Training) -> None:
        self.inner: Any = training.loader
        training.loader = self  # type: ignore[assignment]

    def batch(self, batch_index: int) -> Batch:
        self.before()
        return self.change(self.inner.batch(batch_index))

    def close(self) -> None:
        self.inner.close()

    def before(self) -> None: ...

    def change(self, batch: Batch) -> Batch:
        return batch


def in_training(module: nn.Module) -> bool:
    """True in a training forward pass, but not in evaluation or recomputation."""
    return module.training and torch.is_grad_enabled()


def change_gradient(trigger: Trigger, training: Training, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the gradient of a parameter before it is reduced, in the step at which the fault is due.

    Compiled blocks call no hooks of their layers, so the parameter's block runs eagerly.
    """
    path, _, attribute = name.rpartition(".")
    owner = next((m for part in training.modules for p, m in part.named_modules() if p == path), None)
    if owner is None or not isinstance(getattr(owner, attribute, None), nn.Parameter):
        raise FaultError(f"--fault {trigger.fault.kind}: parameter = {name!r}: not a parameter on rank {trigger.rank}")
    for part in training.modules:
        for block in part.blocks.values():
            if any(module is owner for module in block.modules()):
                block.compiled = None  # type: ignore[assignment]

    def before_forward(module: nn.Module, inputs: Any) -> None:
        # Only here does FSDP expose the gathered parameter, whose gradient is not yet reduced.
        if in_training(module) and trigger.due():
            handles: list[Any] = []

            def changed(gradient: Tensor) -> Tensor:
                handles[0].remove()
                return change(gradient)

            handles.append(getattr(module, attribute).register_hook(changed))

    owner.register_forward_pre_hook(before_forward)
