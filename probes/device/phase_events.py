"""Times of a step on a GPU, from pooled CUDA events ("stamps") on the compute stream, read after they have completed.

    events = PhaseEvents(write)                # write(StampedStep), a step or more later
    events.begin(7)
    events.enter(gap_column); ...; events.leave(phase_column)
    events.enter_wait(); ...; events.leave_wait()      # around each wait of the stream for communication
    events.end(last_gap_column)                # True: `write` will be called for this step

The intervals between stamps are phases, gaps before them, and waits inside either; they add up to the device time of
the step. Stamps need no kernel, no copy and no synchronisation. If the device ran a stamp as soon as its host had
enqueued it (lag 0), the device had been waiting for its host. The interval before such a stamp is *late*.

All steps of 100 ms and more are stamped, and every N-th of shorter ones, so that stamps cost a thousandth of the time.
N is a power of two, so that ranks stamp the same steps. Nothing is recorded while a CUDA graph is captured: the events
would become part of the graph.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..fail_open import record_error
from .capture import is_capturing

__all__ = ["SKIPPED", "PhaseEvents", "PlaceTime", "Stall", "StampedStep"]

DRIFT_PPM = 20
"""Maximum drift between the clocks of a device and its host. Crystals are specified to some 10 to 20."""

MAX_MARKS = 2048
"""Maximum events of one step; a step with more (many microbatches, hundreds of waits) is not recorded."""
MAX_PENDING = 16
"""Maximum number of stamped steps that the device has not completed."""
ALWAYS_ABOVE_NS = 100_000_000
"""Step time from which every step is stamped."""
STAMP_NS = 1_500
"""Host time of a stamp: two CUDA runtime calls and a clock read."""
COST_RATIO = 1_000
"""Minimum ratio of step time to the host time of its stamps."""
MAX_INTERVAL = 64
AT_ONCE_NS = 50_000
"""Maximum lag of a stamp that counts as run at once: a launch on an idle device takes 5 to 20 us, clocks are accurate
to 3 us."""
SHOWN_STALL_NS = 10_000
"""Minimum length of waits and late times that are written individually; shorter ones only count in the sums."""
SKIPPED = object()
"""Result of `end` for a step without stamps, which the stamped steps represent."""
_OF_PLACE, _BEGIN = -2, -1
_monotonic_ns = time.monotonic_ns


class _Mark(NamedTuple):
    """A stamp at the end of an interval. `column`: the interval's column (`_OF_PLACE`: the column of the next phase
    border); `is_wait`: the interval was a wait."""

    column: int
    is_wait: bool
    host_ns: int
    event: Any


class _Time(NamedTuple):
    """Interval between two stamps, on the device's clock."""

    start_ns: int
    end_ns: int
    is_wait: bool
    is_late: bool


class Stall(NamedTuple):
    """A time in which the compute stream was idle, on the host's clock: in a wait, or waiting for the host."""

    column: int
    is_wait: bool
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class PlaceTime:
    """Time of the device in one phase or gap, nanoseconds; waits and late times are parts of it."""

    total_ns: int = 0
    wait_ns: int = 0
    late_ns: int = 0


@dataclass(slots=True)
class StampedStep:
    """One step as its device ran it."""

    step: int
    interval: int
    """Number of steps that this one represents: one in `interval` is stamped."""
    duration_ns: int = 0
    places: dict[int, PlaceTime] = field(default_factory=dict)
    """{column: its time}. The totals add up to the duration."""
    stalls: list[Stall] = field(default_factory=list)


class _Marks:
    """The stamps of a step."""

    __slots__ = ("interval", "marks", "step")

    def __init__(self, step: int, interval: int) -> None:
        self.step, self.interval = step, interval
        self.marks: list[_Mark] = []


class PhaseEvents:
    """The stamps of one rank's steps."""

    def __init__(self, write: Callable[[StampedStep], None], new_event: Callable[[], Any] | None = None) -> None:
        self._write = write
        self._new_event = new_event or _cuda_event
        self._pool: list[Any] = []
        self._current: _Marks | None = None
        self._pending: deque[_Marks] = deque()
        self._wait_depth = 0
        self._clock = DeviceClock()
        self._last: tuple[int, Any] | None = None  # the newest event that was read, and its time on the device
        self._begun: tuple[int, int] | None = None  # the newest step that was read, and when it began on the device
        self._interval = 1
        self._skips = False
        self._is_broken = False

    @property
    def is_open(self) -> bool:
        """True while stamps of a step are taken."""
        return self._current is not None

    def begin(self, step: int) -> None:
        """Begin a step; writes earlier steps that the device has completed."""
        self.collect()
        self._drop(self._current)
        self._wait_depth = 0
        self._current = None
        self._skips = step % self._interval != 0
        if not self._skips and not self._is_broken and len(self._pending) < MAX_PENDING:
            self._current = _Marks(step, self._interval)
            self._mark(_BEGIN, is_wait=False)

    def enter(self, gap: int) -> None:
        """Begin a phase; the time since the previous stamp is the gap before it."""
        self._mark(gap, is_wait=False)

    def leave(self, phase: int) -> None:
        """End a phase, and a wait in it that is still open."""
        self._mark(phase, is_wait=self._wait_depth > 0)
        self._wait_depth = 0

    def enter_wait(self) -> None:
        """Note that the stream is about to wait for communication. Nested waits count once."""
        self._wait_depth += 1
        if self._wait_depth == 1:
            self._mark(_OF_PLACE, is_wait=False)

    def leave_wait(self) -> None:
        """Note that the stream's wait has been enqueued."""
        if self._wait_depth == 1:
            self._mark(_OF_PLACE, is_wait=True)
        self._wait_depth = max(0, self._wait_depth - 1)

    def end(self, gap: int) -> object:
        """End the step. Return True if the step's times will be written, `SKIPPED` if the step has no stamps, and False
        if the times are lost."""
        self._mark(gap, is_wait=False)
        marks, self._current = self._current, None
        if marks is None:
            return SKIPPED if self._skips else False
        self._pending.append(marks)
        return True

    def collect(self) -> None:
        """Write the steps that the device has completed."""
        if self._pending and is_capturing():
            return  # a query would end the capture
        while self._pending and self._pending[0].marks[-1].event.query():
            self._write(self._read(self._pending.popleft()))

    def close(self) -> None:
        """Wait for the device and write the remaining steps at the end of the run."""
        if self._pending:
            self._pending[-1].marks[-1].event.synchronize()
        self.collect()

    def _read(self, marks: _Marks) -> StampedStep:
        """Turn stamps into times, summed from one event to the next: CUDA gives a float of milliseconds."""
        first = marks.marks[0]
        at, before = self._last or (0, first.event)
        at += _elapsed_ns(before, first.event)
        self._clock.lag_ns(first.host_ns, at)
        self._set_interval(marks.step, at, len(marks.marks))
        found, began, before = StampedStep(marks.step, marks.interval), at, first.event
        times: list[_Time] = []  # intervals of the current phase or gap; its column is known at the next border
        for mark in marks.marks[1:]:
            start, at = at, at + _elapsed_ns(before, mark.event)
            lag_ns = self._clock.lag_ns(mark.host_ns, at)
            times.append(_Time(start, at, mark.is_wait, not mark.is_wait and lag_ns <= AT_ONCE_NS))
            before = mark.event
            if mark.column != _OF_PLACE:
                self._add(found, mark.column, times)
                times.clear()
        found.duration_ns = at - began
        if self._last is not None:
            self._pool.append(self._last[1])
        self._last = (at, before)
        self._pool += [mark.event for mark in marks.marks[:-1]]
        return found

    def _add(self, found: StampedStep, column: int, times: list[_Time]) -> None:
        place = found.places.setdefault(column, PlaceTime())
        for start, end, is_wait, is_late in times:
            took = end - start
            place.total_ns += took
            if is_wait:
                place.wait_ns += took
            elif is_late:
                place.late_ns += took
            if (is_wait or is_late) and took >= SHOWN_STALL_NS:
                begin_ns = self._clock.host_ns(start)
                found.stalls.append(Stall(column, is_wait, begin_ns, begin_ns + took))

    def _set_interval(self, step: int, at: int, num_marks: int) -> None:
        """Set the interval of stamped steps from the time since the last stamped one."""
        if self._begun is not None and step > self._begun[0]:
            took = max(1, (at - self._begun[1]) // (step - self._begun[0]))
            interval = 1
            enough = min(ALWAYS_ABOVE_NS, num_marks * STAMP_NS * COST_RATIO)
            while interval < MAX_INTERVAL and took * interval < enough:
                interval *= 2
            self._interval = interval
        self._begun = (step, at)

    def _mark(self, column: int, *, is_wait: bool) -> None:
        marks = self._current
        if marks is None:
            return
        if len(marks.marks) >= MAX_MARKS or is_capturing():
            self._drop(marks)
            self._current = None
            return
        try:
            event = self._pool.pop() if self._pool else self._new_event()
            host_ns = _monotonic_ns()  # read before the event is enqueued, so the device cannot have reached it yet
            event.record()
        except Exception as error:
            self._is_broken, self._current = True, None
            record_error("phase_events", error)
            return
        marks.marks.append(_Mark(column, is_wait, host_ns, event))

    def _drop(self, marks: _Marks | None) -> None:
        if marks is not None:
            self._pool += [mark.event for mark in marks.marks]
            marks.marks = []


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _elapsed_ns(before: Any, event: Any) -> int:
    return 0 if before is event else round(before.elapsed_time(event) * 1e6)


class DeviceClock:
    """Offset of one device's clock. Times in nanoseconds.

    A device runs a stamp after its host enqueued it, so `host - device` of a stamp is at most the offset of the clocks.
    It equals the offset if the device was idle and ran the stamp at once. The largest value seen is therefore the
    offset. On a device that is rarely idle such stamps are far apart and the clocks drift meanwhile, so each value is
    lowered with its age.
    """

    __slots__ = ("_offset_ns", "_seen_ns")

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._seen_ns = 0

    def lag_ns(self, host_ns: int, device_ns: int) -> int:
        """Time from enqueuing a stamp to running it; 0 if the device waited for its host."""
        least = host_ns - device_ns
        offset = self._offset(device_ns)
        if offset is None or least >= offset:
            self._offset_ns, self._seen_ns = least, device_ns
            return 0
        return offset - least

    def host_ns(self, device_ns: int) -> int:
        """Convert to the host's clock; returns the device's time unchanged before the first stamp."""
        return device_ns + (self._offset(device_ns) or 0)

    def _offset(self, device_ns: int) -> int | None:
        if self._offset_ns is None:
            return None
        return self._offset_ns - max(0, device_ns - self._seen_ns) * DRIFT_PPM // 1_000_000
