"""The recorder's interface: what a rank calls while it trains, and the object that records nothing.

    def train(recorder: Recorder) -> None:
        with recorder.step(n):
            with recorder.span("data"): ...
            with recorder.span("forward", microbatch=0): ...
            recorder.log(loss=2.3, tokens=4096)
        recorder.event(event_kinds.EVALUATION, loss=2.1)

    train(TapeRecorder(run.rank_dir(attempt, rank), rank=rank, attempt=attempt))
    train(NullRecorder())                     # probes off

Code that only calls these methods takes a `Recorder`. Code that writes records of its own (with `tape` and `name`)
needs a `probes.tape_recorder.TapeRecorder`, and tests for one with `isinstance`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

__all__ = ["NullRecorder", "Recorder"]


class Recorder(Protocol):
    """Records the steps, spans and events of one rank. No method raises because of a failed write."""

    enabled: bool
    """True if anything is recorded."""
    rank: int
    attempt: int
    step_number: int
    """The current step; between two steps, the previous one."""
    wait_ns: int
    """Nanoseconds blocked in collectives since the start of the process."""

    def describe(self, **identity: Any) -> None:
        """Add to the rank's identity: mesh coordinates (pp, dp_replicate, dp_shard, tp, ...)."""

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Write one event of a kind in `probes.tape.event_kinds`; `step` defaults to the current one."""

    def user_event(self, kind: str, **detail: Any) -> None:
        """Write one event of a kind that the user chose."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Record the block as training step `number`. An exception leaves the step open on the tape."""

    def span(self, kind: str, *, microbatch: int = ..., stage: int = ...) -> AbstractContextManager[object]:
        """Record the block as a span; a `kind` in `step_clock.PHASES` also adds to the step's columns."""

    def phase_of(self, error: BaseException) -> str:
        """Name of the innermost span in which an error was just raised; "" if it was raised outside of all spans."""

    def begin_step(self, number: int, start_ns: int = 0) -> None:
        """Begin step `number` now, or at `start_ns` (monotonic clock): for loops that cannot use `with`."""

    def discard_step(self) -> None:
        """Drop the current step, because the loop ended before training in it."""

    def end_step(self, end_ns: int = 0) -> None:
        """Complete the current step now, or at `end_ns` (monotonic clock)."""

    def log(self, **values: float) -> None:
        """Set columns of the current step (loss, local_loss, grad_norm, lr, tokens, batch_index, committed, ...)."""

    def log_late(self, step: int, **values: float) -> None:
        """Set columns of a step that has ended, after `defer`: values read back from the device with a lag."""

    def defer(self) -> None:
        """Keep the current step open after its end, until `log_late` completes it."""

    def close(self) -> None:
        """Write what is outstanding and close the files. Later calls record nothing."""


_NOTHING: AbstractContextManager[None] = nullcontext()


class NullRecorder:
    """A `Recorder` that records nothing, for runs with the probes off. It only keeps the step number."""

    def __init__(self) -> None:
        self.enabled = False
        self.rank = self.attempt = self.step_number = self.wait_ns = 0

    def describe(self, **identity: Any) -> None:
        pass

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        pass

    def user_event(self, kind: str, **detail: Any) -> None:
        pass

    def step(self, number: int) -> AbstractContextManager[object]:
        self.step_number = number
        return _NOTHING

    def span(self, kind: str, *, microbatch: int = 0, stage: int = 0) -> AbstractContextManager[object]:
        return _NOTHING

    def phase_of(self, error: BaseException) -> str:
        return ""

    def begin_step(self, number: int, start_ns: int = 0) -> None:
        self.step_number = number

    def discard_step(self) -> None:
        pass

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
