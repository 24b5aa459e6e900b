"""Expert load: for each layer and expert of a mixture, the numbers of tokens routed to it and of tokens dropped.

    probe = ExpertProbe(recorder, {3: layer.take_load, ...}, interval=10)
    probe.after_backward(step)          # at every 10th step: rows for the load since the last rows

`take_load()` gives integers of shape (2, experts) on the device: the choices and drops of this rank's tokens since the
last call. It gives None if there were no tokens. Ranks do not communicate: readers of the table sum over them. On a GPU
the numbers come back a step or more later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device.capture import is_capturing
from .fail_open import failing_open
from .recorder import Recorder
from .step_scalars import read_back
from .tape.format.writer import COMPLETE
from .tape_recorder import TapeRecorder

__all__ = ["ExpertProbe"]


MAX_IN_FLIGHT = 8  # maximum number of readings still being copied from the device


class _Reading(NamedTuple):
    """Counts of shape (layers, 2, experts) being copied from the device."""

    step: int
    layers: list[int]
    values: Tensor
    arrived: Any  # the CUDA event after the copy


class ExpertProbe:
    """Writes the `experts` tape of one rank."""

    def __init__(self, recorder: Recorder, layers: Mapping[int, Callable[[], Tensor | None]], *, interval: int) -> None:
        self._recorder = recorder
        self._layers = dict(layers)
        self._interval = interval
        self._in_flight: deque[_Reading] = deque()
        if isinstance(recorder, TapeRecorder):
            self._append = recorder.tape("experts").append
            recorder.at_close.append(self.flush)

    def after_backward(self, step: int) -> None:
        """Write the load since the last rows if `step` is a multiple of the interval (0: never)."""
        if not self._recorder.enabled:
            return
        is_due = self._interval > 0 and step % self._interval == 0
        if (not is_due and not self._in_flight) or is_capturing():
            return
        with failing_open("experts"), torch.no_grad():
            self.flush()
            if not is_due or len(self._in_flight) >= MAX_IN_FLIGHT:  # counting continues until the next reading
                return
            loads = {layer: load for layer, take in self._layers.items() if (load := take()) is not None}
            if not loads:
                return
            values = torch.stack(list(loads.values()))
            if values.is_cuda:
                self._in_flight.append(_Reading(step, list(loads), *read_back(values)))
            else:
                self._write(step, list(loads), values)

    def flush(self) -> None:
        """Write the readings that have come back from the device."""
        while self._in_flight and self._in_flight[0].arrived.query():
            reading = self._in_flight.popleft()
            self._write(reading.step, reading.layers, reading.values)

    def _write(self, step: int, layers: list[int], values: Tensor) -> None:
        for layer, (tokens, dropped) in zip(layers, values.tolist(), strict=True):
            for expert, (count, lost) in enumerate(zip(tokens, dropped, strict=True)):
                self._append(COMPLETE, step, count, lost, layer, expert)
