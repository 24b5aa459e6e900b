"""Profile steps of one rank with torch.profiler: every n-th by schedule, the next ones on request.

    recorder.profiling = StepProfiler(run, recorder, settings, node_rank=0)
    with recorder.step(40): ...          # calls `before_step` and `after_step`

1. Before a step: is a scheduled capture due, or has a request arrived (a file, polled once a second)?
2. The capture runs for some steps, with a range around each phase.
3. After the last one, a thread writes and compresses the trace and records an event `profile_captured`. Traces beyond
   the budget are removed.

Nothing here raises into the training loop, and the numbers of a step do not depend on it. Without a capture it costs
one clock comparison per step.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ..fail_open import record_error
from ..settings.sections import MAX_STEPS, ProfilerSettings
from ..tape import event_kinds
from ..tape.rundir import RunDir
from .request import CaptureRequest, RequestFile

__all__ = ["StepProfiler", "TraceFiles"]

SUFFIX = ".pt.trace.json.gz"
_LEVEL = 4  # gzip level: takes half the time of the default, for files a few percent larger

POLL_S = 1.0
SPAN = "profile"
"""Kind of the span around starting and ending a trace, which takes seconds without other records and is not a hang."""
MAX_S = 30.0
"""Maximum seconds of a capture, which then ends with the current step. The time to end a capture grows with the number
of its events."""
CLOSE_S = 60.0
"""Seconds that a rank waits at its end for its last trace to be written."""


class _Recorder(Protocol):
    """The part of `TapeRecorder` that is used here."""

    rank: int
    attempt: int
    ranges: Any

    def span(self, kind: str) -> AbstractContextManager[object]: ...

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None: ...


class StepProfiler:
    """Called by the recorder around each step, from the thread that trains."""

    def __init__(
        self,
        run: RunDir,
        recorder: _Recorder,
        settings: ProfilerSettings,
        *,
        node_rank: int,
        on_cuda: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder, self._settings, self._on_cuda, self._clock_s = recorder, settings, on_cuda, clock_s
        rank, attempt = recorder.rank, recorder.attempt
        self._files = TraceFiles(run, attempt=attempt, rank=rank, budget_bytes=int(settings.budget_mb * 1e6))
        self._requests = RequestFile(run, node_rank=node_rank, attempt=attempt, rank=rank)
        self._poll_at = 0.0 if settings.on_request else float("inf")
        self._request: CaptureRequest | None = None
        self._trace: Any = None
        self._captured_request: CaptureRequest | None = None  # request of the running capture; None if scheduled
        self._left = self._first_step = 0
        self._until_s = 0.0
        self._writer: threading.Thread | None = None

    def before_step(self, number: int) -> None:
        """Begin a capture that is due with this step, or mark the step in the running capture."""
        try:
            if self._trace is None and not self._begin(number):
                return
            self._trace.begin_step(number)
        except Exception as error:
            self._drop(error)

    def after_step(self, number: int) -> None:
        """Mark the end of a step. With the last step of a capture, end the capture."""
        if self._trace is None:
            return
        try:
            self._trace.end_step()
            self._left -= 1
            if self._left <= 0 or self._clock_s() >= self._until_s:
                self._end(number)
        except Exception as error:
            self._drop(error)

    def close(self) -> None:
        """Drop a capture that is under way, and wait for the last trace to be written."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
        if self._writer is not None:
            self._writer.join(CLOSE_S)

    def _begin(self, number: int) -> bool:
        """Start the capture that is due, if any."""
        if self._clock_s() >= self._poll_at:
            self._poll_at = self._clock_s() + POLL_S
            self._request = self._requests.poll() or self._request
        request = self._request
        if request is not None and number < request.first_step:
            # do not start a scheduled capture: it might still run when the requested one is due on this rank's peer
            return False
        if request is None and not self._settings.is_scheduled(self._recorder.rank, number):
            return False
        if self._writer is not None and self._writer.is_alive():
            return False  # the last trace is still being written; a request is tried again at the next step
        from .ranges import Ranges  # only a capture imports torch's profiler
        from .trace import Trace

        settings = self._settings
        with self._recorder.span(SPAN):  # starting the first capture on a GPU takes seconds
            self._trace = Trace(
                on_cuda=self._on_cuda, record_shapes=settings.record_shapes, with_stack=settings.with_stack
            )
        self._until_s = self._clock_s() + MAX_S
        if not settings.ranges:
            self._recorder.ranges = Ranges(nvtx=False)
        self._left = min(MAX_STEPS, max(1, request.num_steps if request else settings.active_steps))
        self._first_step, self._captured_request = number, request
        self._request = None
        return True

    def _end(self, last_step: int) -> None:
        """Stop recording, and leave the writing to a thread."""
        trace, self._trace = self._trace, None
        self._leave_ranges()
        with self._recorder.span(SPAN):
            trace.stop()
        arguments = (trace, self._first_step, last_step, self._captured_request)
        self._writer = threading.Thread(target=self._write, args=arguments, name="profiler", daemon=True)
        self._writer.start()

    def _write(self, trace: Any, first_step: int, last_step: int, request: CaptureRequest | None) -> None:
        try:
            path = self._files.new_path(first_step, last_step, requested=request is not None)
            raw = path.with_name(f".{path.stem}.{os.getpid()}")
            trace.save(raw)
            num_bytes = self._files.pack(raw, path)
            removed = self._files.prune()
            shown = self._files.relative(path)
            self._recorder.event(
                event_kinds.PROFILE_CAPTURED,
                step=last_step,
                path=None if shown in removed else shown,
                bytes=num_bytes,
                first_step=first_step,
                last_step=last_step,
                request=None if request is None else request.number,
                reason="schedule" if request is None else request.reason,
                removed=removed,
            )
        except Exception as error:
            record_error("profiler.write", error)

    def _drop(self, error: Exception) -> None:
        """Give up a capture that failed, e.g. because another profiler runs."""
        trace, self._trace, self._request = self._trace, None, None
        if trace is not None:
            with contextlib.suppress(Exception):
                trace.stop()
        self._leave_ranges()
        record_error("profiler", error)

    def _leave_ranges(self) -> None:
        if not self._settings.ranges:
            self._recorder.ranges = None


class TraceFiles:
    """The trace files of one rank. Each rank removes only its own traces, so that no two processes remove the same
    file."""

    def __init__(self, run: RunDir, *, attempt: int, rank: int, budget_bytes: int) -> None:
        self._root, self._attempt, self._rank = run.path, attempt, rank
        self._budget_bytes = budget_bytes
        self._num_named: Counter[str] = Counter()

    def new_path(self, first_step: int, last_step: int, *, requested: bool) -> Path:
        """Create the folder of a new trace, and return the trace's path. A step that is repeated after a rollback gets
        a separate trace."""
        folder = self._root / "traces" / f"attempt-{self._attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        kind = "requested" if requested else "scheduled"
        name = f"rank-{self._rank:05d}-steps-{first_step}-{last_step}-{kind}"
        self._num_named[name] += 1
        repetition = f"-{self._num_named[name]}" if self._num_named[name] > 1 else ""
        return folder / f"{name}{repetition}{SUFFIX}"

    def pack(self, raw: Path, path: Path) -> int:
        """Compress a trace and remove the raw file; returns the bytes. Raises OSError."""
        fresh = path.with_name(f".{path.name}")
        try:
            with raw.open("rb") as source, gzip.open(fresh, "wb", compresslevel=_LEVEL) as into:
                shutil.copyfileobj(source, into, 1 << 20)
            fresh.replace(path)
        finally:
            raw.unlink(missing_ok=True)
            fresh.unlink(missing_ok=True)
        return path.stat().st_size

    def prune(self) -> list[str]:
        """Remove traces until the budget is kept, the oldest scheduled ones first and requested ones last; returns
        their paths relative to the run's folder."""
        found = [
            ("requested" in path.name, path.stat().st_mtime_ns, path, path.stat().st_size)
            for path in (self._root / "traces").glob(f"attempt-*/rank-{self._rank:05d}-*{SUFFIX}")
        ]
        used, removed = sum(size for *_, size in found), []
        for _, _, path, size in sorted(found):
            if used <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            used -= size
            removed.append(self.relative(path))
        return removed

    def relative(self, path: Path) -> str:
        """The path in the run's folder."""
        return path.relative_to(self._root).as_posix()
