"""Per-step scalars (loss, norms, the user's own): written immediately on CPU, one or more steps later on CUDA.

    values = StepScalars(recorder)
    values.put(loss=loss.detach())           # a float, or a tensor of one element
    values.put(accuracy=0.5)                 # no column of a step: a row of the table `scalars`
    values.flush()                           # once a step: writes what has come back

A tensor on a GPU is copied to pinned memory by an asynchronous copy: no kernel is launched, one event per step follows
the copies, and nothing waits for the device.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .device.capture import is_capturing
from .fail_open import failing_open, record_error
from .tape.format.schema import TABLES
from .tape.format.writer import COMPLETE
from .tape_recorder import TapeRecorder

__all__ = ["StepScalars", "read_back"]

logger = logging.getLogger("rankscope.probes")
MAX_NAMES = 256
MAX_NAME_CHARS = 200

MAX_IN_FLIGHT = 64
_COLUMNS = {column.name for column in TABLES["steps"].columns} - {"step", "start_ns", "duration_ns"}
"""Columns of a step that may be set; the others are its identity."""


def _on_this_rank(value: float | Tensor) -> float | Tensor | None:
    """Return a DTensor's local value, without a collective; None where each rank holds one part of a sum."""
    placements = getattr(value, "placements", None)
    if placements is None or not hasattr(value, "_local_tensor"):
        return value
    is_whole = all(place.is_replicate() or getattr(place, "reduce_op", "") == "avg" for place in placements)
    local: Tensor = value._local_tensor
    return local if is_whole else None


class _Reading:
    """Values of a step being copied from the device; the event `arrived` follows all of them."""

    __slots__ = ("arrived", "step", "values")

    def __init__(self, step: int) -> None:
        self.step = step
        self.values: list[tuple[tuple[str, ...], Tensor]] = []
        """(columns to set, host tensor that receives the value)"""
        self.arrived: Any = None


class StepScalars:
    """Writes scalars to the steps of one recorder."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._user_scalars = UserScalars(recorder)
        self._in_flight: deque[_Reading] = deque()
        self._pinned: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        recorder.at_close.append(self._write_rest)

    def put(self, /, **values: float | Tensor) -> None:
        """Set columns of the current step; any other name becomes a scalar."""
        on_device: dict[int, tuple[Tensor, list[str]]] = {}
        columns: dict[str, float] = {}
        last: Tensor | None = None
        number = 0.0
        for name, given in values.items():
            value = _on_this_rank(given)
            if value is None:
                continue
            if isinstance(value, Tensor):
                if not value.is_cpu:
                    on_device.setdefault(id(value), (value, []))[1].append(name)
                    continue
                if value is not last:  # a loss is given for two columns: convert it once
                    try:
                        last, number = value, value.item()
                    except Exception as error:  # the value has several elements, or none: skip only this value
                        record_error("scalars", error)
                        last = None
                        continue
            else:
                number, last = value, None
            if name in _COLUMNS:
                columns[name] = number
            else:
                self._user_scalars.write(self._recorder.step_number, **{name: number})
        if columns:
            self._recorder.log(**columns)
        if not on_device or is_capturing():
            return  # a CUDA graph is being captured: operations on the values would become part of it
        reading = self._reading()
        if reading is not None:
            for value, names in on_device.values():
                reading.values.append((tuple(names), self._copied(value)))

    def put_in_open_step(self, **columns: float) -> None:
        """Set columns of the current step, and write what the step has. The step will not end."""
        self._recorder.log(**columns)
        self._recorder.write_step()

    def _reading(self) -> _Reading | None:
        """The current step's reading; None if too many are on their way."""
        step, last = self._recorder.step_number, self._in_flight[-1] if self._in_flight else None
        if last is not None and last.step == step and last.arrived is None:
            return last
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        if last is None or last.step != step:
            self._recorder.defer()  # check once per step, because all readings of a step arrive together
        self._seal()
        self._in_flight.append(_Reading(step))
        return self._in_flight[-1]

    def _copied(self, value: Tensor) -> Tensor:
        free = self._pinned[value.dtype]
        pinned = free.pop() if free else _pinned((), value.dtype)
        return pinned.copy_(value.detach().reshape(()), non_blocking=True)

    def _seal(self) -> None:
        """Record the event after the newest copies."""
        if self._in_flight and self._in_flight[-1].arrived is None:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._in_flight[-1].arrived = event

    def flush(self) -> None:
        """Write what has come back; the last reading of a step completes its record."""
        if not self._in_flight or is_capturing():
            return  # a CUDA graph is being captured: an event would become a part of it, and a query would end it
        self._seal()
        while self._in_flight and (step := self._in_flight[0].step) != self._recorder.step_number:
            readings = [reading for reading in self._in_flight if reading.step == step]
            if not readings[-1].arrived.query():
                return
            found: dict[str, float] = {}
            for reading in readings:
                self._in_flight.popleft()
                for names, pinned in reading.values:
                    number = pinned.item()
                    found |= dict.fromkeys(names, number)
                    self._pinned[pinned.dtype].append(pinned)
            columns = {name: value for name, value in found.items() if name in _COLUMNS}
            self._recorder.log_late(step, **columns)  # even if `columns` is empty, this completes the step's record
            self._user_scalars.write(step, **{name: value for name, value in found.items() if name not in columns})

    def _write_rest(self) -> None:
        """Write all values still on the device, waiting for them."""
        with failing_open("late_values"):
            if self._in_flight and not is_capturing():
                self._seal()
                self._in_flight[-1].arrived.synchronize()
            self.flush()


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of the host, even if the program has set another default device."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def read_back(values: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to pinned memory. Returns the memory, and the event after which the copy has arrived."""
    pinned = _pinned(values.shape, values.dtype)
    pinned.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return pinned, arrived


class UserScalars:
    """The user's scalars of one recorder.

    Names are never removed from the rank's name table, so their number is limited: if a loop makes a new name in each
    step, later names are dropped, with one warning.
    """

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._names: dict[str, int] = {}
        self._is_full = False

    def write(self, step: int, /, **values: float) -> None:
        """Append one record each."""
        with failing_open("scalars"):
            for name, value in values.items():
                number = self._number(name)
                if number is not None:
                    self._recorder.tape("scalars").append(COMPLETE, step, number, float(value))

    def _number(self, name: str) -> int | None:
        known = self._names.get(name)
        if known is not None:
            return known
        if len(self._names) >= MAX_NAMES:
            if not self._is_full:
                self._is_full = True
                logger.warning("rankscope.log: more than %d names; %s and later ones are not kept", MAX_NAMES, name)
            return None
        self._names[name] = number = self._recorder.name(name[:MAX_NAME_CHARS])
        return number
