"""Detect how this process ends: exception, `sys.exit` with a code or text, interrupt, or end of the script.

    end = ProcessEnd(recorder, loop_thread)
    undo = end.hook()            # sys.excepthook, threading.excepthook, sys.exit
    ...
    end.ended_normally()         # in the exit hook: if it is False, the exception or exit is on record

`sys.exit` may be caught, and the process may continue: only the last call before the end counts, and only if no step
has begun since. A script may print an exception that it has caught by calling `sys.excepthook`: this exception is
recorded as the cause if an exit with a number follows in the same step. If a script exits with a number while it
handles an exception (`except Exception: ...; sys.exit(1)`, the ranks of `torch.multiprocessing.spawn`), that exception
is the cause.
`raise SystemExit` and the interpreter's `exit` are only seen under `rankscope run`, which runs the script inside
`exits_of_script`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ..fail_open import failing_open
from ..profiling.memory_snapshots import record_exception
from ..recorder import Recorder
from ..tape import event_kinds
from ..tape.run_facts import exception_fields, package_of_program
from .loop.update_line import Frames, frames_of_error, frames_of_stack
from .patching.replaced import replaced

__all__ = ["EXIT_TYPE", "ProcessEnd", "without_our_frames"]

_PROBES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNS_SCRIPTS = os.path.join("rankscope", "attached_script.py")
_RUNPY = "<frozen runpy>"
_OUTERMOST = ("<module>", "_run_module_as_main")  # of `python train.py` and of `python -m train`

EXIT_TYPE = "SystemExit"
"""Type of the `exception` event of an exit with a code other than 0."""
MAX_TEXT = 4000
MAX_THREAD_ERRORS = 20
"""Maximum number of exceptions recorded for threads other than the loop's: a program may start a thread for each
request, and each may fail."""


class ProcessEnd:
    """Follows the end of the process that one recorder records."""

    def __init__(self, recorder: Recorder, loop_thread: Callable[[], int]) -> None:
        """`loop_thread` returns the identifier of the thread that the training loop runs in."""
        self._recorder = recorder
        self._loop_thread = loop_thread
        self._is_on = True
        self._died = False
        self._num_thread_errors = 0
        self._script_raised = False  # True if the script raised in `exits_of_script`, which recorded the exception
        self._exit: tuple[int, dict[str, Any]] | None = None  # (step, fields of the event) of a call of `sys.exit`
        self._printed: tuple[int, dict[str, Any]] | None = None  # (step, fields) of an exception the script printed
        self.is_of_rank: Callable[[], bool] = lambda: True
        """Returns False in a process that is not a rank: a script that starts the ranks as its children, or a fork."""
        self.at_failure: Callable[[Frames], object] = lambda frames: None
        """Called with the frames of an error or exit before the step of the failure is determined."""
        self.reason: tuple[str, int] = ("finished", 0)
        """Reason and exit code of the run's end on this node."""

    def hook(self) -> Callable[[], None]:
        """Observe exceptions and exits from now on; returns a function that undoes this."""
        undo = [
            replaced(sys, "excepthook", self._at_exception),
            replaced(threading, "excepthook", self._at_thread_exception),
            replaced(sys, "exit", self._at_exit),
        ]

        def restore() -> None:
            self._is_on = False
            for one in undo:
                one()

        return restore

    def ended_normally(self) -> bool:
        """Return True if this process is a rank and ends without an error. An exception or a failing exit that no hook
        has recorded yet is recorded first."""
        if not self._died and (error := _unhandled()) is not None:
            self.record_failure(error)
        if not self._died and self._exit is not None:
            step, fields = self._exit
            if step == self._recorder.step_number:
                self._record(fields)
        return not self._died and self.is_of_rank()

    @contextlib.contextmanager
    def exits_of_script(self) -> Iterator[None]:
        """Record exceptions and exits of the user's script, run in this block, even if it replaces `sys.excepthook`."""
        try:
            yield
        except BaseException as error:
            self.record_failure(error)
            self._script_raised = True
            raise

    def record_failure(self, error: BaseException) -> None:
        """Record an exception or exit of the user's code that no hook of the interpreter sees."""
        with failing_open("attach.exit"):
            if isinstance(error, SystemExit):
                self._exit = None
                if _follows_interrupt(error):
                    self._interrupted()
                elif message := _failure(error.code):
                    self.at_failure(frames_of_error(error))
                    stack = "".join(traceback.format_exception(error))
                    fields = _exit_fields(message, stack, error.code, error.__context__)
                    self._record(fields | {"phase": self._recorder.phase_of(error)})
            else:
                without_our_frames(error)
                if isinstance(error, KeyboardInterrupt):
                    self._interrupted()
                else:
                    self._record_exception(error)

    def _record(self, fields: dict[str, Any]) -> None:
        if self._is_on and self.is_of_rank():
            self._died = True
            self._recorder.event(event_kinds.EXCEPTION, **fields)

    def _record_exception(self, error: BaseException) -> None:
        if self._is_on and self.is_of_rank():
            self._died = True
            self.at_failure(frames_of_error(error))
            record_exception(self._recorder, error)

    def _interrupted(self) -> None:
        if self._is_on:
            self.reason = ("interrupted", 128 + signal.SIGINT)

    def _at_exception(
        self,
        real: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        with failing_open("attach.exception"):
            # The interpreter sets `last_value` before it calls the hook. If it is not set, the script made this call.
            if getattr(sys, "last_value", None) is not error:
                self._printed = (self._recorder.step_number, exception_fields(error))
            elif self._is_on:
                trace = without_our_frames(error)
                if issubclass(kind, KeyboardInterrupt):
                    self._interrupted()
                elif not self._script_raised:
                    self._record_exception(error)
        real(kind, error, trace)

    def _at_thread_exception(self, real: Callable[..., Any], about: Any) -> None:
        """A thread died. If the thread ran the training loop, the rank has failed. Otherwise the process continues, but
        may hang while it waits for the thread."""
        with failing_open("attach.exception"):
            error, thread = about.exc_value, about.thread
            if error is not None and not isinstance(error, SystemExit):
                if thread is not None and thread.ident == self._loop_thread():
                    self._record_exception(error)
                elif self._is_on and self.is_of_rank() and self._num_thread_errors < MAX_THREAD_ERRORS:
                    self._num_thread_errors += 1
                    name = thread.name if thread is not None else ""
                    self._recorder.event(event_kinds.THREAD_EXCEPTION, **exception_fields(error), thread=name)
        real(about)

    def _at_exit(self, real: Callable[..., Any], code: Any = None, /) -> None:
        with failing_open("attach.exit"):
            message = _failure(code)
            if message:
                self.at_failure(frames_of_stack(sys._getframe(2)))
            stack = "Traceback (most recent call last):\n" + "".join(traceback.format_stack(sys._getframe(2)))
            fields = _exit_fields(message, f"{stack}{EXIT_TYPE}: {message}\n", code, sys.exception())
            step, printed = self._printed or (-1, {})
            if isinstance(code, int) and fields["type"] == EXIT_TYPE and step == self._recorder.step_number:
                fields = printed
            self._exit = (self._recorder.step_number, fields) if message else None
        real(code)


def _unhandled() -> BaseException | None:
    """The exception that ended the main script. It is already recorded, except in one case: after `hook`,
    `sys.excepthook` was replaced by a hook that does not call ours (typer and rich do this)."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if trace is None or trace.tb_frame.f_back is not None or trace.tb_frame.f_code.co_name not in _OUTERMOST:
        return None  # the exception was raised in a console or a notebook cell, and the process continued
    return error


def _exit_fields(message: str, stack: str, code: Any, handled: BaseException | None) -> dict[str, Any]:
    """Return the fields of an exit event. If the script exits with a bare number, they describe the exception that is
    being handled."""
    if isinstance(code, int) and isinstance(handled, Exception) and not isinstance(handled, argparse.ArgumentError):
        without_our_frames(handled)
        return exception_fields(handled)
    package = package_of_program()
    return {"type": EXIT_TYPE, "message": message[:MAX_TEXT], "traceback": stack[-20_000:], "package": package}


def _follows_interrupt(error: BaseException | None) -> bool:
    """Return True if an exit is the answer to Ctrl-C, as click's is."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not isinstance(error, KeyboardInterrupt):
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


def _failure(code: Any) -> str:
    """The text of an unsuccessful exit; empty for a successful one."""
    if code is None or code == 0:
        return ""
    return f"exit code {code}" if isinstance(code, int) else str(code)


def without_our_frames(error: BaseException) -> TracebackType | None:
    """Remove Rankscope's frames from `error` and its chained exceptions; returns its traceback. They are kept if there
    are no other frames. This works only on a complete traceback, that is at the process's end, not where the script
    itself prints one.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _stripped(one.__traceback__) or one.__traceback__
        one = one.__cause__ or one.__context__
    return error.__traceback__


def _stripped(trace: TracebackType | None) -> TracebackType | None:
    links: list[TracebackType] = []
    is_start = True
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        is_script = path.endswith(_RUNS_SCRIPTS)
        is_start = is_script or (is_start and path == _RUNPY)
        if not (is_start or os.path.abspath(path).startswith(_PROBES)):
            links.append(trace)
        trace = trace.tb_next
    if not links:  # a script that does not compile has no frame
        return None
    for link, following in zip(links, [*links[1:], None], strict=True):
        link.tb_next = following
    return links[0]
