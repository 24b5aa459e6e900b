"""The recorder: steps, spans and events of one rank, written to its tapes.

    recorder = Recorder(run.rank_dir(attempt, rank), rank=rank, attempt=attempt, world_size=world_size)
    with recorder.step(n):
        with recorder.span("data"): ...
        with recorder.span("forward", microbatch=0): ...
        recorder.log(loss=2.3, tokens=4096)
    recorder.event("rollback", step=n, restored_step=30)
    recorder.close()

A step is written when it begins and again when it ends, and so is a span: what a rank was doing when it died or hung
is on the tape. Spans of a known phase (`PHASES`) add to the step's columns, unless they lie inside another such span:
the phases of a step never add up to more than the step.
A disabled recorder (`Recorder.disabled()`) has the same methods and does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from .device.cpu_time import CoreTime
from .device.gpu_uuid import device_uuid
from .device.memory import AllocatorRetries, memory_reader
from .fail_open import error_counts, failing_open, record_error
from .tape.attempts import start_ticks
from .tape.events import EventWriter
from .tape.names import NameWriter
from .tape.schema import TABLES, UNSET
from .tape.writer import COMPLETE, OPEN, TapeWriter

__all__ = ["PHASES", "Recorder"]

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluate")
_WAIT_PHASES = ("data", "forward", "backward", "optimizer")
_STEP_COLUMNS = {column.name: i for i, column in enumerate(TABLES["steps"].columns)}
_LATE = (
    "loss",
    "local_loss",
    "grad_norm",
    "local_grad_norm",
    "lr",
    "tokens",
    "batch_index",
    "committed",
    "nonfinite_count",
)
_NONE_I32 = int(UNSET["i32"])
_NONE_I64 = int(UNSET["i64"])
MAX_REMEMBERED = 4096  # kinds of spans: stages and microbatches are few
_MEMORY_INTERVAL_NS = 1_000_000_000  # reading /proc costs more than the rest of a step's record
_monotonic_ns = time.monotonic_ns


def _phase_columns() -> dict[str, tuple[int, int]]:
    """Kind of span -> where its time and its wait go in a step's row; -1: nowhere."""
    columns = {
        phase: (_STEP_COLUMNS[f"{phase}_ns"], _STEP_COLUMNS[f"{phase}_wait_ns"] if phase in _WAIT_PHASES else -1)
        for phase in PHASES
    }
    # Pipelines have more kinds: see `probes.pipeline`.
    columns["loss"] = columns["forward"]
    columns["weight"] = columns["reduce"] = columns["backward"]
    columns["replay"] = (-2, -2)  # nowhere, and neither does what lies inside it: it is no part of the step
    return columns


_PHASE_COLUMNS = _phase_columns()
_STEP, _START, _DURATION = _STEP_COLUMNS["step"], _STEP_COLUMNS["start_ns"], _STEP_COLUMNS["duration_ns"]
_CPU, _WAIT, _GC = _STEP_COLUMNS["cpu_ns"], _STEP_COLUMNS["collective_wait_ns"], _STEP_COLUMNS["gc_ns"]
_RUN_DELAY, _FAULTS = _STEP_COLUMNS["run_delay_ns"], _STEP_COLUMNS["major_faults"]
_MEMORY = _STEP_COLUMNS["memory_bytes"]


class Recorder:
    """Writes what one rank does. Times come from `time.monotonic_ns`."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        attempt: int,
        world_size: int = 1,
        local_rank: int = 0,
        node_rank: int = 0,
        device: str = "cpu",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.rank = rank
        self.attempt = attempt
        self.enabled = True
        self.step_number = 0
        self.phase = 0
        """Name number of the innermost open span: what a collective is filed under."""
        self.wait_ns = 0
        """Nanoseconds blocked in collectives so far; whoever waits adds to it."""
        self.at_close: list[Callable[[], None]] = []
        """Called before the tapes are sealed: for values that are still on their way from a device."""
        self.name = NameWriter(directory / "names.jsonl")
        self._events = EventWriter(directory / "events.jsonl", attempt=attempt, rank=rank)
        self._tapes: dict[str, TapeWriter] = {}
        self._steps = self.tape("steps")
        self._spans = self.tape("spans")
        self._pack_span, self._open_span = self._spans.opener("step", "start_ns")
        self._finish_span = self._spans.finisher("end_ns", "wait_ns")
        self._span_kinds: dict[tuple[str, int, int], _SpanKind] = {}
        self._empty_row = self._steps.unset_row()
        for phase, wait in _PHASE_COLUMNS.values():
            if phase >= 0:
                self._empty_row[phase] = 0
            if wait >= 0:
                self._empty_row[wait] = 0
        self._row = self._empty_row.copy()
        pack_step, self._open_step = self._steps.opener("step", "start_ns")
        self._empty_step = pack_step(*self._empty_row[2:])  # what follows those two
        self._in_phase = False
        self._memory_bytes, self._memory_read_ns = _NONE_I64, 0
        self._read_memory, self.allocator = memory_reader(device), AllocatorRetries(device)
        self._step_start_ns = self._step_wait_start_ns = 0
        self._core_time = CoreTime()
        self._slot = -1
        self._late: dict[int, int] = {}  # step number -> slot, for values that are read back later
        self._gc_ns = 0
        self._gc_start_ns = 0
        gc.callbacks.append(self._on_gc)
        self._identity: dict[str, Any] = {
            "world_size": world_size,
            "local_rank": local_rank,
            "node_rank": node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "device": device,
            "clock_offset_ns": time.time_ns() - time.monotonic_ns(),
        }
        with failing_open("recorder.device_uuid"):
            if uuid := device_uuid(device):
                self._identity["device_uuid"] = uuid
        self._events.write("rank", **self._identity)

    @staticmethod
    def disabled() -> Recorder:
        """A recorder that records nothing, for runs with the probes off."""
        return _DisabledRecorder()

    def describe(self, **identity: Any) -> None:
        """Add to what is known of this rank: mesh coordinates (pp, dp_replicate, dp_shard, tp, ...)."""
        self._identity.update(identity)
        self._events.write("rank", **self._identity)

    def tape(self, table: str) -> TapeWriter:
        """The tape of a table, opened at its first use."""
        if table not in self._tapes:
            self._tapes[table] = TapeWriter(self.directory, TABLES[table], rank=self.rank, attempt=self.attempt)
        return self._tapes[table]

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Write one event; the current step is filled in."""
        self._events.write(kind, step=self.step_number if step is None else step, **detail)

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Record the block as training step `number`. An exception leaves the step open on the tape."""
        return _Step(self, number)

    def span(self, kind: str, *, microbatch: int = _NONE_I32, stage: int = _NONE_I32) -> _Span:
        """A context manager that records its block; `kind` in PHASES also adds to the step's columns."""
        known = self._span_kinds.get((kind, microbatch, stage))
        return _Span(self, known if known is not None else self._span_kind(kind, microbatch, stage))

    def log(self, **values: float) -> None:
        """Set columns of the current step (loss, local_loss, grad_norm, lr, tokens, batch_index, committed, ...)."""
        try:
            for column, value in values.items():
                self._row[_STEP_COLUMNS[column]] = value
        except Exception as error:
            record_error("recorder.log", error)

    def log_late(self, step: int, **values: float) -> None:
        """Set columns of a step that has ended: values that were read back from the device with a lag."""
        with failing_open("recorder.log"):
            slot = self._late.get(step, -1)
            for column, value in values.items():
                self._steps.set(slot, column, value)
            self._steps.complete(slot)
            self._late.pop(step, None)

    def defer(self) -> None:
        """The current step's values come later through `log_late`: it stays open until then."""
        self._late[self.step_number] = self._slot

    def close(self) -> None:
        """Write what was swallowed and dropped, seal the tapes, close the files."""
        for last_look in self.at_close:
            with failing_open("recorder.close"):
                last_look()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_gc)
        dropped = {name: tape.dropped for name, tape in self._tapes.items() if tape.dropped}
        self._events.write("rank_closed", probe_errors=dict(error_counts), dropped_records=dropped)
        for tape in self._tapes.values():
            tape.close()
        self._core_time.close()
        self._events.close()
        self.name.close()

    def _span_kind(self, kind: str, microbatch: int, stage: int) -> _SpanKind:
        if len(self._span_kinds) >= MAX_REMEMBERED:
            self._span_kinds.clear()
        try:
            name = self.name(kind)
            rest = self._pack_span(microbatch, stage, name, _NONE_I64, _NONE_I64)
            found = _SpanKind(name, rest, *_PHASE_COLUMNS.get(kind, (-1, -1)))
        except Exception as error:
            record_error("recorder.span", error)
            return _SpanKind(0, b"", -1, -1)
        self._span_kinds[kind, microbatch, stage] = found
        return found

    def begin_step(self, number: int, start_ns: int = 0) -> None:
        """Begin step `number`, now or as of `start_ns`. Where a loop is not ours to be put into a `with`."""
        self.step_number = number
        self._row = row = self._empty_row.copy()
        row[_STEP] = number
        self._in_phase = False
        self._gc_ns = 0
        self._step_wait_start_ns = self.wait_ns
        self._core_time.begin()
        row[_START] = self._step_start_ns = start_ns or _monotonic_ns()
        self._slot = self._open_step(self._empty_step, number, self._step_start_ns)

    def end_step(self, end_ns: int = 0) -> None:
        """Complete the current step, now or as of `end_ns`."""
        row = self._row
        now = end_ns or _monotonic_ns()
        row[_DURATION] = now - self._step_start_ns
        row[_CPU], row[_RUN_DELAY], row[_FAULTS] = self._core_time.end()
        row[_WAIT] = self.wait_ns - self._step_wait_start_ns
        row[_GC] = self._gc_ns
        if row[_MEMORY] == _NONE_I64:
            if now - self._memory_read_ns > _MEMORY_INTERVAL_NS:
                self._memory_read_ns = now
                self._memory_bytes = self._read_memory()
                self.allocator.tell(self.event)
            row[_MEMORY] = self._memory_bytes
        deferred = self.step_number in self._late
        self._steps.rewrite(self._slot, OPEN if deferred else COMPLETE, *row)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_start_ns = time.monotonic_ns()
        else:
            self._gc_ns += time.monotonic_ns() - self._gc_start_ns


class _Step:
    """One step of a recorder."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def __enter__(self) -> None:
        try:
            self._recorder.begin_step(self._number)
        except Exception as error:
            record_error("recorder.step", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._recorder.end_step()
            except Exception as failure:
                record_error("recorder.step", failure)


class _SpanKind(NamedTuple):
    """What is the same in all spans of a kind, microbatch and stage: it is packed once."""

    name: int
    rest: bytes  # of the record
    column: int  # where its time goes in a step's row; -1: nowhere; -2: nor does what lies inside it
    wait_column: int


class _Span:
    """One span of a recorder; entering stores it open, leaving completes it."""

    __slots__ = ("_counts", "_known", "_outer_phase", "_recorder", "_slot", "_start_ns", "_wait_start_ns")

    def __init__(self, recorder: Recorder, known: _SpanKind) -> None:
        self._recorder = recorder
        self._known = known
        self._slot = -1
        self._counts = False

    def __enter__(self) -> None:
        recorder = self._recorder
        self._outer_phase = recorder.phase
        self._wait_start_ns = recorder.wait_ns
        try:
            recorder.phase, rest, column, _ = self._known
            if column != -1 and not recorder._in_phase:
                self._counts = recorder._in_phase = True
            self._start_ns = start = _monotonic_ns()
            self._slot = recorder._open_span(rest, recorder.step_number, start)
        except Exception as error:
            record_error("recorder.span", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        try:
            end = _monotonic_ns()
            waited = recorder.wait_ns - self._wait_start_ns
            recorder.phase = self._outer_phase
            recorder._finish_span(self._slot, end, waited)
            if self._counts:
                recorder._in_phase = False
                _, _, column, wait_column = self._known
                row = recorder._row
                if column >= 0:
                    row[column] += end - self._start_ns
                if wait_column >= 0:
                    row[wait_column] += waited
        except Exception as failure:
            record_error("recorder.span", failure)


class _DisabledRecorder(Recorder):
    """Does nothing; has every method of a recorder."""

    def __init__(self) -> None:
        self.enabled = False
        self.rank = self.attempt = self.step_number = self.phase = self.wait_ns = 0

    def describe(self, **identity: Any) -> None:
        pass

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        pass

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        self.step_number = number
        return contextlib.nullcontext()

    def span(self, kind: str, *, microbatch: int = 0, stage: int = 0) -> Any:
        return contextlib.nullcontext()

    def begin_step(self, number: int, start_ns: int = 0) -> None:
        self.step_number = number

    def end_step(self, end_ns: int = 0) -> None:
        pass

    def log(self, **values: float) -> None:
        pass

    def log_late(self, step: int, **values: float) -> None:
        pass

    def defer(self) -> None:
        pass

    def close(self) -> None:
        pass
