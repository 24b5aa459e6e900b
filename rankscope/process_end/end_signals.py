"""Handle SIGTERM and SIGHUP of a command: restore the terminal, end its processes, exit with 128 + the signal's number.

    code = run_to_signal(app)            # in `rankscope.cli.main`

Like Ctrl-C, they raise an exception, so that a command's resources are closed. A library may replace that exception
with another error (DuckDB does), so after a signal no error is reported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from analyzers.report.terminal.lost_terminal import leave_lost_terminal

__all__ = ["run_to_signal"]

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
RAISE_AGAIN_S = 0.05
Result = TypeVar("Result")


class _EndRequest(KeyboardInterrupt):
    """Raised on SIGTERM and SIGHUP; handlers of Ctrl-C handle it, too. A subclass is needed because CPython ends the
    process with SIGINT if a plain KeyboardInterrupt passes through `exec` (imports).
    """


class _Received:
    """Handler of both signals. `number`: the first one received. `is_interrupted`: Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.number = 0
        self.is_interrupted = False
        self.report_ignored = sys.unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.number:  # a second signal would interrupt the clean-up
            self.number = number
            leave_lost_terminal()
            raise _EndRequest

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = True
        signal.default_int_handler(number, frame)

    def raise_again(self, ignored: sys.UnraisableHookArgs) -> None:
        """Raise the signal again if its exception could not propagate, for instance from a callback of the garbage
        collector.
        """
        if not isinstance(ignored.exc_value, _EndRequest):
            self.report_ignored(ignored)
            return
        while True:
            try:
                number, self.number = self.number, 0
                timer = threading.Timer(RAISE_AGAIN_S, os.kill, (os.getpid(), number))
                timer.daemon = True
                timer.start()
                return
            except _EndRequest:  # the signal arrived within this function, where Python ignores exceptions, too
                continue

    def leave(self) -> None:
        """Restore the signal handlers: after the command, and in a forked process."""
        for number in SIGNALS:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self.interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_in_foreground() -> bool:
    """Return True if Ctrl-C in its terminal is meant for this process."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal
        return False


def run_to_signal(command: Callable[[], Result]) -> Result:
    """Run a command to its end. After a signal, raises SystemExit with its exit code. `nohup` is respected."""
    received = _Received()
    sys.unraisablehook = received.raise_again
    os.register_at_fork(after_in_child=received.leave)
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and _is_in_foreground():
            # A shell script started this process with SIGINT ignored, although it is in the terminal's foreground.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, received.interrupt)
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, received)
        result = command()
    except BaseException as error:
        if received.number:
            raise SystemExit(128 + received.number) from None
        if received.is_interrupted and isinstance(error, Exception):
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    finally:
        received.leave()
        sys.unraisablehook = received.report_ignored
    if received.number:  # exit with the code for this signal, even after a KeyboardInterrupt or a normal end
        raise SystemExit(128 + received.number)
    return result
