"""Carries faults out inside a rank: hooks and wrappers that exist only in a run that asked for faults.

    arm(faults, training, recorder, run, rank=2, world_size=4)

Each fault leaves a marker on the disk and an event before it acts; the marker keeps it from firing twice in a run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from probes.recorder import Recorder
from probes.rundir import RunDir
from trainer.data.batches import Batch
from trainer.drills.faults import Fault, FaultError
from trainer.training import Training

__all__ = ["arm"]


def arm(
    faults: Sequence[Fault],
    training: Training,
    recorder: Recorder,
    run: RunDir,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Prepare `training` on this rank for its faults. Raises FaultError for a rank or parameter that is not there."""
    for number, fault in enumerate(faults):
        if fault.rank >= world_size:
            raise FaultError(f"--fault {fault.kind}: rank = {fault.rank}: the run has ranks 0 to {world_size - 1}")
        if fault.rank in (-1, rank) or _spoils_the_same_rows(fault, training):
            trigger = _Trigger(fault, number, recorder, run, rank)
            _ARM[fault.kind](trigger, training)


def _spoils_the_same_rows(fault: Fault, training: Training) -> bool:
    """Ranks of one tensor-parallel group read the same rows: a batch that is bad for one is bad for all."""
    return fault.kind == "bad_batch" and training.plan.data_rank(fault.rank) == training.data_rank


class _Trigger:
    """Knows whether its fault is due, and tells it before it acts."""

    def __init__(self, fault: Fault, number: int, recorder: Recorder, run: RunDir, rank: int) -> None:
        self.fault = fault
        self.recorder = recorder
        self._marker = run.path / "faults" / f"{number}-{fault.kind}-rank-{rank}"
        self._spent = self._marker.exists()
        self.firing = False

    @property
    def step(self) -> int:
        return self.recorder.step_number

    def due(self) -> bool:
        """Whether to act now, at the fault's step; True only once in a run."""
        if self._spent or self.step != self.fault.step:
            return False
        self.fire()
        return True

    def lasting(self) -> bool:
        """Whether a fault that goes on for many steps is on; it begins once and ends with its attempt."""
        if self.firing:
            return not self.fault.until or self.step <= self.fault.until
        if self._spent or self.step < self.fault.step:
            return False
        self.fire()
        return True

    def fire(self) -> None:
        """Leave the marker on the disk, then say so."""
        self._spent = self.firing = True
        self._marker.parent.mkdir(exist_ok=True)
        with self._marker.open("w") as file:
            os.fsync(file.fileno())
        self.tell()

    def tell(self) -> None:
        self.recorder.event("fault_injected", fault=self.fault.kind, parameters=self.fault.parameters())


class _FaultyLoader:
    """A loader that does something before, or to, the batches that it hands out."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def batch(self, batch_index: int) -> Batch:
        self.before()
        return self.change(self.inner.batch(batch_index))

    def close(self) -> None:
        self.inner.close()

    def before(self) -> None: ...

    def change(self, batch: Batch) -> Batch:
        return batch


def _arm_act(trigger: _Trigger, training: Training) -> None:
    class Acting(_FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                _act(trigger.fault)

    training.loader = Acting(training.loader)  # type: ignore[assignment]


def _act(fault: Fault) -> None:
    match fault.kind:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "exception":
            raise RuntimeError(f"injected fault: exception at step {fault.step} on rank {fault.rank}")


def _arm_hang(trigger: _Trigger, training: Training) -> None:
    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training and trigger.due():
            _sleep_for_ever()

    training.modules[-1].register_forward_hook(after_forward)


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(1.0)


def _arm_slow_data(trigger: _Trigger, training: Training) -> None:
    fault, clock = trigger.fault, _StepClock()

    class Slow(_FaultyLoader):
        def before(self) -> None:
            own_s = clock.own_s(trigger.recorder)
            if trigger.lasting():
                time.sleep(fault.seconds or (fault.factor or 2.0) * own_s - own_s)
                clock.pause(trigger.recorder)

    training.loader = Slow(training.loader)  # type: ignore[assignment]


class _StepClock:
    """Seconds of a rank's own work between two calls: without waits for others, without what the fault adds."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def own_s(self, recorder: Recorder) -> float:
        now, waited = time.monotonic_ns(), recorder.wait_ns
        before, self._last = self._last, (now, waited)
        return 0.0 if before is None else max(0, now - before[0] - (waited - before[1])) / 1e9

    def pause(self, recorder: Recorder) -> None:
        self._last = (time.monotonic_ns(), recorder.wait_ns)


def _arm_nan_grad(trigger: _Trigger, training: Training) -> None:
    last = list(training.modules[-1].blocks)[-1]
    name = trigger.fault.parameter or f"blocks.{last}.mlp.up.weight"
    path, _, attribute = name.rpartition(".")
    owner = next((m for part in training.modules for p, m in part.named_modules() if p == path), None)
    if not isinstance(getattr(owner, attribute, None), nn.Parameter):
        raise FaultError(f"--fault nan_grad: parameter = {name!r}: not a parameter on rank {trigger.recorder.rank}")

    def before_forward(module: nn.Module, inputs: Any) -> None:
        # Only here does FSDP show the gathered parameter, whose gradient is the one before the reduction.
        if module.training and torch.is_grad_enabled() and trigger.due():
            handles: list[Any] = []

            def poison(grad: Tensor) -> Tensor:
                handles[0].remove()
                return _poisoned(grad)

            handles.append(getattr(module, attribute).register_hook(poison))

    assert isinstance(owner, nn.Module)
    owner.register_forward_pre_hook(before_forward)


def _poisoned(grad: Tensor) -> Tensor:
    bad = grad.clone()
    local = bad.to_local() if isinstance(bad, DTensor) else bad
    local.view(-1)[0] = float("nan")
    return bad


def _arm_bad_batch(trigger: _Trigger, training: Training) -> None:
    fault, told = trigger.fault, [False]

    class Bad(_FaultyLoader):
        def change(self, batch: Batch) -> Batch:
            if batch.index != fault.batch_index:
                return batch
            if not told[0]:
                told[0] = True
                trigger.tell()
            generator = torch.Generator().manual_seed(batch.index * 1_000_003 + training.data_rank)
            shape, size = batch.inputs.shape, training.config.model.vocab_size
            tokens = torch.randint(size, (shape[0], shape[1] + 1), generator=generator)
            return Batch(
                index=batch.index,
                inputs=tokens[:, :-1].contiguous(),
                targets=tokens[:, 1:].contiguous(),
                sample_ids=batch.sample_ids,
            )

    training.loader = Bad(training.loader)  # type: ignore[assignment]


def _arm_slow_compute(trigger: _Trigger, training: Training) -> None:
    drag = _Drag(training.device, (trigger.fault.factor or 1.5) - 1.0, trigger.recorder)
    for part in training.modules:
        for block in (*part.blocks.values(), part.head):
            if block is not None:
                _SlowBlock(trigger, drag, block)


class _SlowBlock:
    """Makes one block's forward and backward take `factor` times their own measured time, by computing more."""

    def __init__(self, trigger: _Trigger, drag: _Drag, block: nn.Module) -> None:
        self.trigger = trigger
        self.forward, self.backward = _Work(drag), _Work(drag)
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._after)

    def _before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training or not self.trigger.lasting():
            return
        self.forward.begin()
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: self.backward.end())  # type: ignore[no-untyped-call]

    def _after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.forward.begun:
            if output.requires_grad:
                output.register_hook(lambda grad: self.backward.begin())  # type: ignore[no-untyped-call]
            self.forward.end()


class _Drag:
    """Work added so far. What one block adds may fall between another's begin and end, and is not that block's own."""

    def __init__(self, device: torch.device, share: float, recorder: Recorder) -> None:
        self.share = share
        self.recorder = recorder
        self.is_cuda = device.type == "cuda"
        self.cycles_per_ms = 0.0
        if self.is_cuda:
            self.cycles_per_ms = float(getattr(torch.cuda.get_device_properties(device), "clock_rate", 1_500_000))
        self.added = 0.0
        """Nanoseconds on a CPU, cycles on a GPU."""

    def compute_for(self, ns: float) -> None:
        start, matrix = time.monotonic_ns(), torch.ones(32, 32)
        while time.monotonic_ns() - start < ns:
            matrix = matrix @ matrix * (1 / 32)
        self.added += time.monotonic_ns() - start

    def compute_on_gpu_for(self, cycles: float) -> None:
        torch.cuda._sleep(int(cycles))  # type: ignore[no-untyped-call]
        self.added += cycles


class _Work:
    """One piece of work between `begin` and `end`: measured as wall time without waits for other ranks, then dragged.

    On a GPU the time is that of the kernels, taken with events and read one call later, so that nothing waits.
    """

    def __init__(self, drag: _Drag) -> None:
        self.drag = drag
        self.begun = False
        self._start = (0, 0, 0.0)
        self._events: list[Any] = []
        self._own_cycles = 0.0

    def begin(self) -> None:
        drag, self.begun = self.drag, True
        if drag.is_cuda:
            if len(self._events) == 2 and self._events[1].query():
                elapsed = self._events[0].elapsed_time(self._events[1]) * drag.cycles_per_ms
                self._own_cycles = max(0.0, elapsed - self._start[2])
            self._events = [_recorded_event()]
        self._start = (time.monotonic_ns(), drag.recorder.wait_ns, drag.added)

    def end(self) -> None:
        if not self.begun:
            return
        drag, self.begun = self.drag, False
        added = drag.added - self._start[2]
        if drag.is_cuda:
            self._events.append(_recorded_event())
            self._start = (0, 0, added)
            drag.compute_on_gpu_for(self._own_cycles * drag.share)
            return
        own_ns = time.monotonic_ns() - self._start[0] - (drag.recorder.wait_ns - self._start[1]) - added
        drag.compute_for(max(0.0, own_ns) * drag.share)


def _recorded_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_ARM = {
    "nan_grad": _arm_nan_grad,
    "slow_compute": _arm_slow_compute,
    "slow_data": _arm_slow_data,
    "bad_batch": _arm_bad_batch,
    **dict.fromkeys(("stop", "kill", "exception", "exit"), _arm_act),
    "hang": _arm_hang,
}
