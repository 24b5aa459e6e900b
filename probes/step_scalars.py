"""Per-step scalars (loss, norms): written immediately on CPU, one or more steps later on CUDA.

    values = StepScalars(recorder)
    values.put(loss=loss.detach())           # a float, or a tensor of one element
    values.flush()                           # once a step: what has come back

A tensor on a GPU is copied to pinned memory and read when the copy has arrived: nothing waits for the device.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device.capture import is_capturing
from .fail_open import failing_open
from .tape.schema import TABLES
from .tape_recorder import TapeRecorder

__all__ = ["StepScalars", "read_back"]

MAX_IN_FLIGHT = 64
_REAL = {column.name for column in TABLES["steps"].columns if column.type.startswith("f")}


class _Reading(NamedTuple):
    step: int
    names: tuple[str, ...]
    values: Tensor
    arrived: Any


class StepScalars:
    """Writes scalars to the steps of one recorder."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._in_flight: deque[_Reading] = deque()
        recorder.at_close.append(self._last)

    def put(self, **values: float | Tensor) -> None:
        """Set columns of the current step."""
        on_device = {}
        captures = is_capturing()
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.is_cpu:
                if captures:
                    continue  # what we did to it would become a part of the graph
                on_device[name] = value.detach().double().reshape(())
            else:
                self._recorder.log(**{name: typed(name, value.item() if isinstance(value, Tensor) else value)})
        if on_device and len(self._in_flight) < MAX_IN_FLIGHT:
            copied, arrived = read_back(torch.stack(tuple(on_device.values())))
            step = self._recorder.step_number
            if not self._in_flight or self._in_flight[-1].step != step:
                self._recorder.defer()  # once: all readings of a step come back together
            self._in_flight.append(_Reading(step, tuple(on_device), copied, arrived))

    def flush(self) -> None:
        """Write what has come back; the last reading of a step completes its record."""
        if self._in_flight and is_capturing():
            return  # a query would end the capture
        while self._in_flight and self._in_flight[0].arrived.query():
            step = self._in_flight[0].step
            if step == self._recorder.step_number:
                return  # its record is not written yet
            found: dict[str, float] = {}
            while self._in_flight and self._in_flight[0].step == step:
                reading = self._in_flight[0]
                reading.arrived.synchronize()  # of one step: they come within moments of each other
                numbers = zip(reading.names, reading.values.tolist(), strict=True)
                found |= {name: typed(name, number) for name, number in numbers}
                self._in_flight.popleft()
            self._recorder.log_late(step, **found)

    def _last(self) -> None:
        with failing_open("late_values"):
            if self._in_flight:
                self._in_flight[-1].arrived.synchronize()
            self.flush()


def typed(column: str, value: float) -> float:
    """A number as the step's column takes it: a whole one where it counts something."""
    return float(value) if column in _REAL else int(value)


def read_back(values: Tensor) -> tuple[Tensor, Any]:
    """A copy in pinned memory, and the event after which it is there."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return pinned, arrived
