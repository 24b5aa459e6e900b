"""Slow computing: every forward and backward pass takes `factor` times as long, by real computation.

ARM["slow_compute"](trigger, training)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from probes.recorder import Recorder
from trainer.faults.trigger import Trigger
from trainer.torch_compat import keep_device_busy
from trainer.training.rank_training import Training

__all__ = ["ARM"]


def _arm_slow_compute(trigger: Trigger, training: Training) -> None:
    drag = _Drag(training.device, (trigger.fault.factor or 1.5) - 1.0, trigger.recorder)
    for part in training.modules:
        for block in (*part.blocks.values(), part.head):
            if block is not None:
                _SlowBlock(trigger, drag, block)


class _SlowBlock:
    """Makes one block's forward and backward take `factor` times their measured time, by computing more."""

    def __init__(self, trigger: Trigger, drag: _Drag, block: nn.Module) -> None:
        self.trigger = trigger
        self.forward, self.backward = _Work(drag), _Work(drag)
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._after)

    def _before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training or not self.trigger.lasting():
            return
        self.forward.start()
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: self.backward.end())  # type: ignore[no-untyped-call]

    def _after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.forward.active:
            if output.requires_grad:
                output.register_hook(lambda grad: self.backward.start())  # type: ignore[no-untyped-call]
            self.forward.end()


class _Drag:
    """Total work added so far. Work that one block adds may fall within another block's measurement, from which it must
    be subtracted.
    """

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
        keep_device_busy(int(cycles))
        self.added += cycles


class _Work:
    """Work between `start` and `end`: measures its wall time without waits for other ranks, then adds work.

    On a GPU, the time of the kernels is measured with events and read one call later, so that nothing blocks.
    """

    def __init__(self, drag: _Drag) -> None:
        self.drag = drag
        self.active = False
        self._start = (0, 0, 0.0)
        self._events: list[Any] = []
        self._own_cycles = 0.0

    def start(self) -> None:
        drag, self.active = self.drag, True
        if drag.is_cuda:
            if len(self._events) == 2 and self._events[1].query():
                elapsed = self._events[0].elapsed_time(self._events[1]) * drag.cycles_per_ms
                self._own_cycles = max(0.0, elapsed - self._start[2])
            self._events = [_recorded_event()]
        self._start = (time.monotonic_ns(), drag.recorder.wait_ns, drag.added)

    def end(self) -> None:
        if not self.active:
            return
        drag, self.active = self.drag, False
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


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {"slow_compute": _arm_slow_compute}
