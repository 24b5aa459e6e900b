"""Phases of a step on a GPU: pooled events on the compute stream, read when the device has passed them.

    events = PhaseEvents(write)                # write(step, {column: ns}), a step or more later
    events.begin(7)
    events.enter(gap_column); ...; events.leave(phase_column)
    events.end(last_gap_column)                # True: `write` will be called for this step

Between two events lies a phase or the gap before one, so they add up to the time of the device from the begin of the
step to its end. With one microbatch ten events a step or fewer; no kernel, no copy, and nothing waits for the device.
While a CUDA graph is captured nothing is recorded: events of ours would become a part of the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .capture import is_capturing

__all__ = ["PhaseEvents"]

MAX_MARKS = 64
"""Events of one step; one with more phases (many microbatches) is left out rather than made dear."""
MAX_PENDING = 16
"""Steps that the device has not passed."""


class _Marks:
    """The events of a step: each with the column of the time before it."""

    __slots__ = ("events", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.events: list[tuple[int, Any]] = []


class PhaseEvents:
    """The marks of one rank's steps."""

    def __init__(self, write: Callable[[int, dict[int, int]], None]) -> None:
        self._write = write
        self._pool: list[Any] = []
        self._current: _Marks | None = None
        self._pending: deque[_Marks] = deque()

    def begin(self, step: int) -> None:
        """A step begins; writes those that the device has passed."""
        self.collect()
        self._drop(self._current)
        self._current = _Marks(step) if len(self._pending) < MAX_PENDING else None
        self._mark(-1)

    def enter(self, gap: int) -> None:
        """A phase begins; the time since the last mark is the gap before it."""
        self._mark(gap)

    def leave(self, phase: int) -> None:
        """A phase ends."""
        self._mark(phase)

    def end(self, gap: int) -> bool:
        """The step ends. False if its times will not be known."""
        self._mark(gap)
        marks, self._current = self._current, None
        if marks is None:
            return False
        self._pending.append(marks)
        return True

    def collect(self) -> None:
        """Write the steps that the device has passed."""
        if self._pending and is_capturing():
            return  # a query would end the capture
        while self._pending and self._pending[0].events[-1][1].query():
            marks = self._pending.popleft()
            times: dict[int, int] = {}
            before = marks.events[0][1]
            for column, event in marks.events[1:]:
                times[column] = times.get(column, 0) + int(before.elapsed_time(event) * 1e6)
                before = event
            self._drop(marks)
            self._write(marks.step, times)

    def close(self) -> None:
        """Wait for the device and write the rest: the run is over."""
        if self._pending:
            self._pending[-1].events[-1][1].synchronize()
        self.collect()

    def _mark(self, column: int) -> None:
        marks = self._current
        if marks is None:
            return
        if len(marks.events) >= MAX_MARKS or is_capturing():
            self._drop(marks)
            self._current = None
            return
        event: Any = self._pool.pop() if self._pool else None
        if event is None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        marks.events.append((column, event))

    def _drop(self, marks: _Marks | None) -> None:
        if marks is not None:
            self._pool += [event for _, event in marks.events]
            marks.events = []
