"""The step clock: writes one row of the `steps` tape per step, from its start to its end.

    clock = StepClock(steps_tape, device="cpu")
    clock.begin(7, wait_ns=0)
    ...                                       # spans add to clock.row, values are set in it
    clock.end(wait_ns=5, on_retries=write)    # duration, CPU time, waiting, garbage collection, memory

A step is written when it begins and again when it ends, so the step in which a rank died or hung is on tape. A span of
a known phase (`PHASES`) adds to the row, unless it lies inside another such span. So the phases never add up to more
than the step. The time between phases adds to a gap (`GAPS`), named by the phase after it. Phases and gaps add up to
the step. In a step without any known phase the gaps are UNSET.

On a GPU the host runs ahead of its device. It waits for the device (and thus for other ranks) whenever it reads back a
value. So the step, its phases, gaps and waits are timed by events on the compute stream
(`probes.device.phase_events`) and written a step or more later. Steps without such stamps have at most host times of
the whole step, loading, checkpoints and evaluations. For these steps analyzers use the durations of calls
(`analyzers.account.device.device_timings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .device.cpu_time import CoreTime
from .device.gc_pauses import GcPauses
from .device.memory import AllocatorRetries, memory_reader
from .fail_open import record_error
from .tape.format.schema import TABLES, UNSET
from .tape.format.writer import COMPLETE, OPEN, TAKEN_BACK, TapeWriter

if TYPE_CHECKING:
    from .device.phase_events import PhaseEvents, StampedStep

__all__ = [
    "GAPS",
    "NO_PHASE",
    "PHASES",
    "PHASE_COLUMNS",
    "PhaseColumns",
    "StepClock",
    "not_measured_on_devices",
]

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluate")
GAPS = ("before_forward", "forward_to_backward", "backward_to_optimizer", "after_optimizer")
NO_COLUMN = -1
"""Spans of this kind add to no column of the step."""
OUTSIDE_STEP = -2
"""Spans of this kind, and spans inside them, are not part of the step."""
_WAIT_PHASES = ("data", "forward", "backward", "optimizer")
_COLUMNS = {column.name: i for i, column in enumerate(TABLES["steps"].columns)}
_COUNTS = {column.name for column in TABLES["steps"].columns if column.type != "f64"}
_MAX_COUNT = 2**61
"""Readers treat larger values as not recorded."""
_NAMES = {i: name for name, i in _COLUMNS.items()}
_UNSET_I64 = int(UNSET["i64"])
_MEMORY_INTERVAL_NS = 1_000_000_000  # reading /proc costs more than the rest of a step's record
_monotonic_ns = time.monotonic_ns


class PhaseColumns(NamedTuple):
    """Indices in a step's row for a kind of span: its time and wait, and time and wait of the gap before it."""

    time: int = NO_COLUMN
    wait: int = NO_COLUMN
    gap: int = NO_COLUMN
    gap_wait: int = NO_COLUMN


NO_PHASE = PhaseColumns()
_GAP_BEFORE = {
    "data": "before_forward", "forward": "before_forward", "backward": "forward_to_backward",
    "optimizer": "backward_to_optimizer", "checkpoint": "after_optimizer", "evaluate": "after_optimizer",
}  # fmt: skip


def _phase_columns() -> dict[str, PhaseColumns]:
    """Return the columns by kind of span."""
    columns = {}
    for phase in PHASES:
        wait = _COLUMNS[f"{phase}_wait_ns"] if phase in _WAIT_PHASES else NO_COLUMN
        gap = _GAP_BEFORE[phase]
        columns[phase] = PhaseColumns(_COLUMNS[f"{phase}_ns"], wait, _COLUMNS[f"{gap}_ns"], _COLUMNS[f"{gap}_wait_ns"])
    # Pipelines have more kinds: see `probes.pipeline`.
    columns["loss"] = columns["forward"]
    columns["weight"] = columns["reduce"] = columns["backward"]
    columns["replay"] = columns["optimizer"]._replace(time=OUTSIDE_STEP, wait=OUTSIDE_STEP)
    return columns


PHASE_COLUMNS = _phase_columns()
ON_DEVICE = frozenset(
    column
    for phase in ("forward", "backward", "optimizer")
    for column in (PHASE_COLUMNS[phase].time, PHASE_COLUMNS[phase].gap)
) | {_COLUMNS["after_optimizer_ns"]}
"""Columns with times of work done on a GPU."""
_WAITS = frozenset(index for name, index in _COLUMNS.items() if name.endswith("_wait_ns"))
_STEP, _START, _DURATION = _COLUMNS["step"], _COLUMNS["start_ns"], _COLUMNS["duration_ns"]
_CPU, _WAIT, _GC = _COLUMNS["cpu_ns"], _COLUMNS["collective_wait_ns"], _COLUMNS["gc_ns"]
_RUN_DELAY, _FAULTS = _COLUMNS["run_delay_ns"], _COLUMNS["major_faults"]
_DATA = _COLUMNS["data_ns"]
_MEMORY, _STAMPED = _COLUMNS["memory_bytes"], _COLUMNS["stamped_steps"]
_GAP_COLUMNS = tuple(_COLUMNS[f"{gap}{suffix}"] for gap in GAPS for suffix in ("_ns", "_wait_ns"))
_LAST_GAP, _LAST_GAP_WAIT = _COLUMNS["after_optimizer_ns"], _COLUMNS["after_optimizer_wait_ns"]


def not_measured_on_devices() -> list[str]:
    """Columns of `steps` that stay UNSET in steps without stamps on a GPU."""
    return sorted(_NAMES[column] for column in ON_DEVICE | _WAITS)


def _phase_events(write: Callable[[StampedStep], None]) -> PhaseEvents:
    # needs torch; modules that only need column names must import without it
    from .device.phase_events import PhaseEvents

    return PhaseEvents(write)


def _column_value(column: str, value: float) -> float:
    """Convert a number to its column's type: int for counts. Raises ValueError or OverflowError for NaN or Inf."""
    if column not in _COUNTS:
        return float(value)
    whole = int(value)
    if not 0 <= whole < _MAX_COUNT:
        raise ValueError(f"{column} = {whole if abs(whole) < 10**30 else 'a number of over 30 digits'}: not a count")
    return whole


class StepClock:
    """Measures the steps of one rank and writes them to its `steps` tape. Times are `time.monotonic_ns`."""

    def __init__(
        self,
        tape: TapeWriter,
        *,
        device: str,
        stalls: TapeWriter | None = None,
        name: Callable[[str], int] | None = None,
    ) -> None:
        """`stalls`: tape of the GPU's stalls; `name`: function from a name to its number on that tape. Only for a
        GPU."""
        self._tape, self._stalls, self._name = tape, stalls, name
        self._empty_row = tape.unset_row()
        is_host = not device.startswith("cuda")
        self.measures_waits = is_host
        """True if the rank's waits for others are known on its host."""
        self.events = None if is_host else _phase_events(self._write_stamped)
        self._not_counted: frozenset[int] = frozenset() if is_host else ON_DEVICE | _WAITS
        for column in (column for columns in PHASE_COLUMNS.values() for column in columns if column >= 0):
            if column not in self._not_counted:
                self._empty_row[column] = 0
        self.row = self._empty_row.copy()
        """The current step's columns."""
        self.in_phase = False
        """True if a span that adds to the row is open."""
        self._gap_start_ns = self._gap_start_wait_ns = 0
        pack_step, self._open_step = tape.opener("step", "start_ns")
        self._empty_step = pack_step(*self._empty_row[2:])  # packed unset values of all later columns
        self._memory_bytes, self._memory_read_ns = _UNSET_I64, 0
        self.read_device(device)
        self._start_ns = self._start_wait_ns = 0
        self._core_time = CoreTime()
        self._slot = -1
        self._number = 0
        self._deferred: dict[int, list[int]] = {}  # {step number: one entry for each caller that keeps the step open}
        self.gc = GcPauses()
        self._gc_start_ns = 0

    def read_device(self, device: str) -> None:
        """Read the memory of this device from now on."""
        self._read_memory, self.allocator = memory_reader(device), AllocatorRetries(device)

    def begin(self, number: int, *, wait_ns: int, start_ns: int = 0) -> None:
        """Begin step `number`, now or at `start_ns`; `wait_ns`: the rank's waiting so far."""
        self._number = number
        self.row = row = self._empty_row.copy()
        row[_STEP] = number
        self.in_phase = False
        self._gc_start_ns = self.gc.total_ns
        self._start_wait_ns = wait_ns
        self._core_time.begin()
        row[_START] = self._start_ns = self._gap_start_ns = start_ns or _monotonic_ns()
        self._gap_start_wait_ns = wait_ns
        self._slot = self._open_step(self._empty_step, number, self._start_ns)
        if self.events is not None:
            self.events.begin(number)

    def end(self, *, wait_ns: int, on_retries: Callable[..., None], end_ns: int = 0) -> None:
        """Complete the step, now or at `end_ns`. `on_retries` is called with retries of the allocator."""
        row = self.row
        now = end_ns or _monotonic_ns()
        row[_DURATION] = now - self._start_ns
        if self._gap_start_ns == self._start_ns:  # the step has no phase, so it has no gaps between phases
            for column in _GAP_COLUMNS:
                row[column] = _UNSET_I64
        else:
            self._add_gap(_LAST_GAP, _LAST_GAP_WAIT, now - self._gap_start_ns, wait_ns - self._gap_start_wait_ns)
            if self.events is not None:
                self._end_stamps(self.events)
        row[_CPU], row[_RUN_DELAY], row[_FAULTS] = self._core_time.end()
        if self.measures_waits:
            row[_WAIT] = wait_ns - self._start_wait_ns
        row[_GC] = self.gc.total_ns - self._gc_start_ns
        if row[_MEMORY] == _UNSET_I64:
            if now - self._memory_read_ns > _MEMORY_INTERVAL_NS:
                self._memory_read_ns = now
                self._memory_bytes = self._read_memory()
                self.allocator.report(on_retries)
            row[_MEMORY] = self._memory_bytes
        self._tape.rewrite(self._slot, OPEN if self._number in self._deferred else COMPLETE, *row)

    def write(self) -> None:
        """Write what the newest step has so far; it stays open."""
        self._tape.rewrite(self._slot, OPEN, *self.row)

    def discard(self) -> None:
        """Discard the newest step, because nothing was done in it."""
        self._tape.rewrite(self._slot, TAKEN_BACK, *self.row)

    def add_phase(self, columns: PhaseColumns, start_ns: int, end_ns: int, start_wait_ns: int, wait_ns: int) -> None:
        """Add a phase and the gap before it, with the rank's waiting up to its start and within it (ns)."""
        self.in_phase = False
        row, not_counted = self.row, self._not_counted
        phase, wait, gap, gap_wait = columns
        if phase >= 0 and phase not in not_counted:
            row[phase] += end_ns - start_ns
        if wait >= 0 and wait not in not_counted:
            row[wait] += wait_ns
        if self.events is not None:
            self.events.leave(phase)
        self._add_gap(gap, gap_wait, start_ns - self._gap_start_ns, start_wait_ns - self._gap_start_wait_ns)
        self._gap_start_ns, self._gap_start_wait_ns = end_ns, start_wait_ns + wait_ns

    def _add_gap(self, column: int, wait_column: int, gap_ns: int, wait_ns: int) -> None:
        if gap_ns > 0:
            row = self.row
            if column not in self._not_counted:
                row[column] += gap_ns
            if wait_column not in self._not_counted:
                row[wait_column] += min(max(0, wait_ns), gap_ns)

    def enter_phase(self, columns: PhaseColumns) -> None:
        """Note that a span which adds to the row begins."""
        self.in_phase = True
        if self.events is not None:
            self.events.enter(columns.gap)

    def _end_stamps(self, events: PhaseEvents) -> None:
        from .device.phase_events import SKIPPED

        stamped = events.end(_LAST_GAP)
        if stamped is SKIPPED:
            self.row[_STAMPED] = 0
            self.row[_DATA] = _UNSET_I64  # the stamped steps represent this one in its data time, too
        elif stamped:
            self.defer()

    def _write_stamped(self, step: StampedStep) -> None:
        """Replace the host times of a finished step by its device times."""
        values = {"duration_ns": step.duration_ns, "stamped_steps": step.interval, "collective_wait_ns": 0}
        for place in (*PHASES, *GAPS):
            times = step.places.get(_COLUMNS[f"{place}_ns"])
            values[f"{place}_ns"] = times.total_ns if times else 0
            if f"{place}_wait_ns" in _COLUMNS:
                values[f"{place}_wait_ns"] = times.wait_ns if times else 0
                values[f"{place}_late_ns"] = times.late_ns if times else 0
                values["collective_wait_ns"] += times.wait_ns if times else 0
        if self._stalls is not None and self._name is not None:
            for column, is_wait, start_ns, end_ns in step.stalls:
                place = _NAMES[column].removesuffix("_ns")
                waits_for = "communication" if is_wait else "host"
                self._stalls.append(COMPLETE, step.step, start_ns, end_ns, self._name(place), self._name(waits_for))
        self.set_late(step.step, **values)

    def set(self, **values: float) -> None:
        """Set columns of the current step. A value that its column cannot take is left out and counted as an error."""
        for column, value in values.items():
            try:
                self.row[_COLUMNS[column]] = _column_value(column, value)
            except Exception as error:
                record_error("recorder.log", error)

    def defer(self) -> None:
        """Keep the current step open after its end, until `set_late` has been called as many times as `defer`."""
        self._deferred.setdefault(self._number, []).append(self._slot)

    def set_late(self, step: int, **values: float) -> None:
        """Set columns of a deferred step, and complete it if nothing else keeps it open."""
        slots = self._deferred.get(step)
        slot = slots.pop() if slots else -1
        for column, value in values.items():
            try:
                self._tape.set(slot, column, _column_value(column, value))
            except Exception as error:
                record_error("recorder.log", error)
        if not slots:
            self._tape.complete(slot)
            self._deferred.pop(step, None)

    def close(self) -> None:
        """Write steps still on the device, remove the garbage collector's callback and close the /proc file."""
        if self.events is not None:
            self.events.close()
        self.gc.close()
        self._core_time.close()
