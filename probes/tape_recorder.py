"""Recorder that writes a rank's steps, spans and events to its tapes.

    recorder = TapeRecorder(run.rank_dir(attempt, rank), rank=rank, attempt=attempt, world_size=world_size)
    with recorder.step(n), recorder.span("forward", microbatch=0): ...
    recorder.close()

The methods are those of `probes.recorder.Recorder`. A span is written when it begins and again when it ends, so the
activity of a rank that died or hung is on the tape. `probes.step_clock` builds the row of a step.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .fail_open import error_counts, failing_open, record_error
from .step_clock import NO_PHASE, PHASE_COLUMNS, PhaseColumns, StepClock
from .tape import event_kinds
from .tape.attempts import start_ticks
from .tape.events import EventWriter
from .tape.files.held_folder import HeldFolder
from .tape.format.names import NameWriter
from .tape.format.schema import TABLES, UNSET
from .tape.format.writer import TapeWriter

if TYPE_CHECKING:
    from .device.phase_events import PhaseEvents
    from .profiling.memory_snapshots import MemorySnapshots
    from .profiling.ranges import Ranges
    from .profiling.step_profiler import StepProfiler

__all__ = ["MAX_REMEMBERED", "TapeRecorder", "device_uuid", "nvml_name"]

_UNSET_I32 = int(UNSET["i32"])
_UNSET_I64 = int(UNSET["i64"])
MAX_REMEMBERED = 4096  # cached (kind, microbatch, stage) combinations; normally few
_MAX_CHAIN = 100
"""Maximum length of a chain of exceptions."""
_monotonic_ns = time.monotonic_ns


class TapeRecorder:
    """Writes the tapes and events of one rank. Times are `time.monotonic_ns`."""

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
        """Name number of the innermost open span, to which a collective is attributed; 0 outside of spans."""
        # (id, type) of the newest error that has left a span
        self._last_error: tuple[int, type[BaseException] | None] = (0, None)
        self._last_error_in: tuple[str, int] = ("", 0)  # that span's kind, and the step
        self.wait_ns = 0
        """Nanoseconds blocked in collectives so far; the collectives' probe adds to it."""
        self.at_close: list[Callable[[], None]] = []
        """Called before the tapes are closed, to write values that are still on a device."""
        self.profiling: StepProfiler | None = None
        """Captures steps with torch's profiler; None unless configured."""
        self.ranges: Ranges | None = None
        """Opens a range around each span, for profilers."""
        self.memory: MemorySnapshots | None = None
        """Writes a snapshot of CUDA memory when the rank dies of an out-of-memory error."""
        self.name = NameWriter(directory / "names.jsonl")
        self._events = EventWriter(directory / "events.jsonl", attempt=attempt, rank=rank)
        self._folder = HeldFolder(directory)
        self._tapes: dict[str, TapeWriter] = {}
        # Read at the same time as the first tape's clock anchor. The store dates all tapes by it, and the wall clock
        # may be changed later.
        clock_offset_ns = time.time_ns() - time.monotonic_ns()
        stalls = self.tape("device_stalls") if device.startswith("cuda") else None
        self._clock = StepClock(self.tape("steps"), device=device, stalls=stalls, name=self.name)
        spans = self.tape("spans")
        self._pack_span, self._open_span = spans.opener("step", "start_ns")
        self._finish_span = spans.finisher("end_ns", "wait_ns")
        self._span_kinds: dict[tuple[str, int, int], _SpanKind] = {}
        self._identity: dict[str, Any] = {
            "world_size": world_size,
            "local_rank": local_rank,
            "node_rank": node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "device": device,
            "clock_offset_ns": clock_offset_ns,
        }
        self.at_device: list[Callable[[], None]] = []
        """Called once CUDA is initialised, if the rank has a GPU."""
        self._lacks_device = device.startswith("cuda")
        self._events.write(event_kinds.RANK, **self._identity)
        self.identify_device()

    @property
    def stamps(self) -> PhaseEvents | None:
        """Stamps on the compute stream of a rank's GPU; None on a CPU."""
        return self._clock.events

    def identify_device(self) -> None:
        """Add facts that need an initialised CUDA context, once. Until the program initialises CUDA, the driver is not
        touched: the program may still set CUDA_VISIBLE_DEVICES, or fork.
        """
        if not self._lacks_device:
            return
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: no types
            return
        self._lacks_device = False
        with failing_open("recorder.device_uuid"):
            device = self._identity["device"]
            index = torch.device(device).index or 0
            # the program may have chosen another device, or see only one
            if (current := torch.cuda.current_device()) or index >= torch.cuda.device_count():
                device = f"cuda:{current}"
                self._clock.read_device(device)
            uuid = device_uuid(device)
            self.describe(device=device, **({"device_uuid": uuid} if uuid else {}))
            for callback in self.at_device:
                callback()

    def describe(self, **identity: Any) -> None:
        """Add to the rank's identity and write it again."""
        self._identity.update(identity)
        self._events.write(event_kinds.RANK, **self._identity)

    def tape(self, table: str) -> TapeWriter:
        """The tape of a table, opened at its first use."""
        if table not in self._tapes:
            self._tapes[table] = TapeWriter(
                self.directory, TABLES[table], rank=self.rank, attempt=self.attempt, directory_fd=self._folder.fd
            )
        return self._tapes[table]

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Write one event of the catalogue; `step` defaults to the current one."""
        self._events.write(kind, step=self.step_number if step is None else step, **detail)

    def user_event(self, kind: str, **detail: Any) -> None:
        """Write one event of a user-defined kind; `step` defaults to the current one."""
        self._events.write_any(kind, **{"step": self.step_number, **detail})

    def step(self, number: int) -> _Step:
        """Record the block as training step `number`. An exception leaves the step open on the tape."""
        return _Step(self, number)

    def span(self, kind: str, *, microbatch: int = _UNSET_I32, stage: int = _UNSET_I32) -> _Span:
        """A context manager that records its block; `kind` in PHASES also adds to the step's columns."""
        known = self._span_kinds.get((kind, microbatch, stage))
        return _Span(self, known if known is not None else self._span_kind(kind, microbatch, stage))

    def log(self, **values: float) -> None:
        """Set columns of the current step; an unknown column is counted as an error."""
        try:
            self._clock.set(**values)
        except Exception as error:
            record_error("recorder.log", error)

    def log_late(self, step: int, **values: float) -> None:
        """Set columns of a step that has ended, after `defer`, and complete it."""
        with failing_open("recorder.log"):
            self._clock.set_late(step, **values)

    def defer(self) -> None:
        """Keep the current step open after its end, until `log_late` completes it."""
        self._clock.defer()

    def close(self) -> None:
        """Write `rank_closed` with the errors and dropped records counted so far, and close the tapes and files."""
        for callback in self.at_close:
            with failing_open("recorder.close"):
                callback()
        if self.profiling is not None:
            with failing_open("profiler"):
                self.profiling.close()
        self._clock.close()
        dropped = {name: tape.dropped for name, tape in self._tapes.items() if tape.dropped}
        self._events.write(event_kinds.RANK_CLOSED, probe_errors=dict(error_counts), dropped_records=dropped)
        for tape in self._tapes.values():
            tape.close()
        self._folder.close()
        self._events.close()
        self.name.close()

    def _span_kind(self, kind: str, microbatch: int, stage: int) -> _SpanKind:
        if len(self._span_kinds) >= MAX_REMEMBERED:
            self._span_kinds.clear()
        try:
            name = self.name(kind)
            rest = self._pack_span(microbatch, stage, name, _UNSET_I64, _UNSET_I64)
            found = _SpanKind(name, rest, PHASE_COLUMNS.get(kind, NO_PHASE), kind)
        except Exception as error:
            record_error("recorder.span", error)
            return _SpanKind(0, b"", NO_PHASE, kind)
        self._span_kinds[kind, microbatch, stage] = found
        return found

    def note_error(self, error: BaseException, kind: str) -> None:
        """Remember that an error propagated out of a span of this kind."""
        known = (id(error), type(error))  # a reference to the error would keep tensors alive
        if self._last_error != known:
            self._last_error, self._last_error_in = known, (kind, self.step_number)

    def phase_of(self, error: BaseException) -> str:
        """Name of the innermost span in which an error was just raised; "" if it was raised outside of all spans."""
        kind, step = self._last_error_in
        links: list[BaseException] = [error]
        while len(links) < _MAX_CHAIN and (before := links[-1].__cause__ or links[-1].__context__) is not None:
            links.append(before)
        is_known = any(self._last_error == (id(link), type(link)) for link in links)
        return kind if is_known and step >= self.step_number - 1 else ""

    def begin_step(self, number: int, start_ns: int = 0) -> None:
        """Begin step `number`, now or at `start_ns`."""
        if self.profiling is not None:
            self.profiling.before_step(number)
        self.step_number = number
        self._clock.begin(number, wait_ns=self.wait_ns, start_ns=start_ns)

    def discard_step(self) -> None:
        """Discard the current step; no step follows it."""
        with failing_open("recorder.step"):
            self._clock.discard()

    def write_step(self) -> None:
        """Write the columns that the current step has; it stays open."""
        with failing_open("recorder.step"):
            self._clock.write()

    def end_step(self, end_ns: int = 0) -> None:
        """Complete the current step, now or at `end_ns`."""
        self._clock.end(wait_ns=self.wait_ns, on_retries=self.event, end_ns=end_ns)
        self.identify_device()
        if self.profiling is not None:
            self.profiling.after_step(self.step_number)
        self._clock.gc.raise_again()


class _Step:
    """One step of a recorder."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: TapeRecorder, number: int) -> None:
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
    """The fields shared by all spans of a kind, microbatch and stage, packed once."""

    name: int
    rest: bytes  # packed constant fields of the span's record
    columns: PhaseColumns  # columns in the step's row
    kind: str


class _Span:
    """One span of a recorder; entering stores it open, leaving completes it."""

    __slots__ = (
        "_counts",
        "_known",
        "_leave_range",
        "_outer_phase",
        "_recorder",
        "_slot",
        "_start_ns",
        "_wait_start_ns",
    )

    def __init__(self, recorder: TapeRecorder, known: _SpanKind) -> None:
        self._recorder = recorder
        self._known = known
        self._slot = -1
        self._counts = False
        self._leave_range: Callable[[], None] | None = None

    def __enter__(self) -> None:
        recorder = self._recorder
        self._outer_phase = recorder.phase
        self._wait_start_ns = recorder.wait_ns
        try:
            recorder.phase, rest, columns, kind = self._known
            if columns is not NO_PHASE and not recorder._clock.in_phase:
                self._counts = True
                recorder._clock.enter_phase(columns)
            self._start_ns = start = _monotonic_ns()
            self._slot = recorder._open_span(rest, recorder.step_number, start)
            if recorder.ranges is not None:
                self._leave_range = recorder.ranges.enter(kind)
        except Exception as error:
            record_error("recorder.span", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        try:
            if self._leave_range is not None:
                self._leave_range()
            end = _monotonic_ns()
            waited = recorder.wait_ns - self._wait_start_ns
            recorder.phase = self._outer_phase
            clock = recorder._clock
            recorder._finish_span(self._slot, end, waited if clock.measures_waits else _UNSET_I64)
            if (raised := error or sys.exception()) is not None:
                recorder.note_error(raised, self._known.kind)
            if self._counts:
                clock.add_phase(self._known.columns, self._start_ns, end, self._wait_start_ns, waited)
        except Exception as failure:
            record_error("recorder.span", failure)
        if recorder._clock.gc.raised is not None:
            recorder._clock.gc.raise_again()


def device_uuid(device: str) -> str:
    """Return the UUID; empty for a CPU, and where this torch does not report it.

    A device ordinal has no meaning outside of the process: CUDA_VISIBLE_DEVICES renumbers devices, and CUDA orders them
    by speed, but NVML by bus address.
    """
    if not device.startswith("cuda"):
        return ""
    import torch

    properties = torch.cuda.get_device_properties(device)
    is_slice = " MIG " in f" {getattr(properties, 'name', '')} "
    return nvml_name(getattr(properties, "uuid", None), is_slice=is_slice)


def nvml_name(uuid: Any, *, is_slice: bool = False) -> str:
    """Convert CUDA's UUID of a GPU, or of a MIG slice, to NVML's form."""
    text = str(uuid or "")
    return text if not text or text.startswith(("GPU-", "MIG-")) else f"{'MIG' if is_slice else 'GPU'}-{text}"
