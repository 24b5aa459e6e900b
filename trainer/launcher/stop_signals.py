"""Stop signals of a launcher: a verdict, an orderly end within a time budget, and an immediate end on a second Ctrl-C.

    with StopSignals(actions, grace_s=lambda: 20.0) as stop:
        stop.listen()                            # after the last fork, because it starts a thread
        with stop.raising(SignalException):      # the first signal raises this in the main thread
            ...
        stop.ranks_left_s()                      # seconds until ranks that get a signal now are killed

1. First signal: `actions.announce` records it, then `actions.report` prints what is known. Meanwhile the main thread
   ends the ranks.
2. Second Ctrl-C, or end of the budget (`trainer.stop_budget`): `actions.end_at_once` is called, and the process exits.

Python runs a signal handler only when the main thread returns from C, which may take minutes during a wait for a store
or disk. So the C handler wakes a separate thread through a pipe.

Time in which the launcher did not run, as in a suspended job, does not count: its ranks did not run either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Protocol

from analyzers.report.terminal.lost_terminal import leave_lost_terminal
from probes.tape.pauses import PAUSE_S, paused_since
from trainer.stop_budget import KILL_MARGIN_S, budget_s, rank_grace_s

__all__ = ["STOP_SIGNALS", "StopActions", "StopSignals"]

logger = logging.getLogger("rankscope.trainer")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
REPEAT_S = 0.2
"""A second Ctrl-C within this number of seconds counts as the first one, because a wrapper may forward the signal that
the terminal has already delivered.
"""
ANNOUNCE_S = 1.0
"""Maximum seconds to wait for the stop event to be written before the ranks are ended. The disk may not respond."""
VERDICT_S = 1.5
"""Seconds of the time budget reserved for the final output."""
_CLOSE = 0


class StopActions(Protocol):
    """Actions of a launcher on a stop; called in the thread of `StopSignals`."""

    def announce(self, number: int) -> None:
        """Record that the run is being stopped."""

    def report(self, number: int) -> None:
        """Print the findings so far."""

    def end_at_once(self, number: int, reason: str) -> None:
        """Kill ranks and `watch`, and record the end. The process exits when it returns."""


class StopSignals:
    """At most one instance per process at a time, used from the main thread."""

    def __init__(self, actions: StopActions, *, grace_s: Callable[[], float]) -> None:
        self.number = 0
        """Number of the first signal; 0 before any."""
        self._actions, self._grace_s = actions, grace_s
        self._exception: Callable[[int], BaseException] | None = None
        self._has_raised = False
        self._began_s = 0.0
        self._given_s = 0.0
        self._announced = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self.take_over()
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._thread is not None:
            os.write(self._writer, bytes([_CLOSE]))
            self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def take_over(self) -> None:
        """Set the handlers. They replace handlers of other libraries. `nohup` is respected."""
        for number in STOP_SIGNALS:
            is_ignored = number == signal.SIGHUP and self._before[number] == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_ignored else self.received)

    def listen(self) -> None:
        """Start the thread that handles signals. Until then signals are stored, because a process with threads must not
        be forked."""
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def raising(self, exception: Callable[[int], BaseException] | None) -> Iterator[None]:
        """Raise `exception(number)` in the main thread on the first signal, even if the signal came before this block
        began. With None nothing is raised within the block, and the exception of the enclosing block after it.
        """
        outer, self._exception = self._exception, exception
        try:
            self._raise_pending()
            yield
        finally:
            self._exception = outer
        self._raise_pending()

    def received(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Only the first one interrupts the main thread; a second would interrupt the orderly end."""
        self.number = self.number or number
        self._raise_pending()

    def wait_announced(self) -> None:
        """Wait until a pending stop is recorded, so that the ending ranks do not look like a recovery."""
        if self.number and self._thread is not None:
            self._announced.wait(ANNOUNCE_S)

    def ranks_left_s(self) -> float | None:
        """Seconds until ranks that get their signal now are killed; None before any signal. A rank's grace period
        starts when the rank gets the signal, which a busy machine or a slow disk may delay.
        """
        left_s = self.records_left_s()
        return None if left_s is None else min(rank_grace_s(self._grace_s()) + KILL_MARGIN_S, left_s)

    def records_left_s(self) -> float | None:
        """Seconds that the last ingestion may still take; None without a signal."""
        return max(0.0, budget_s(self._grace_s()) - VERDICT_S - self._elapsed_s()) if self.number else None

    def end_process(self, code: int) -> None:
        """End the process after a stop, without the interpreter's clean-up, which may take seconds with torch."""
        if self.number:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(code)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s if self._began_s else 0.0

    def _raise_pending(self) -> None:
        if self.number and self._exception is not None and not self._has_raised:
            self._has_raised = True
            raise self._exception(self.number)

    def _listen(self) -> None:
        while True:
            left_s = self._given_s - self._elapsed_s() if self._began_s else None
            rest_s = None if left_s is None else min(max(0.0, left_s), PAUSE_S)
            begin_s = time.monotonic()
            is_ready = select.select([self._reader], [], [], rest_s)[0]
            if rest_s is not None:
                self._began_s += paused_since(begin_s, rest_s)
            if not is_ready:
                if self._elapsed_s() >= self._given_s:
                    self._end_at_once(f"The run had not ended {self._given_s:.0f} s after the signal.")
                continue
            number = os.read(self._reader, 1)[0]
            if number == _CLOSE:
                return
            if number in STOP_SIGNALS and not self._began_s:
                self._begin(number)
            elif number in _FROM_KEYBOARD and self._elapsed_s() > REPEAT_S:
                self._end_at_once(f"{signal.Signals(number).name} was received again.")

    def _begin(self, number: int) -> None:
        self._began_s = time.monotonic()
        self.number = self.number or number
        leave_lost_terminal()
        try:
            self._given_s = budget_s(self._grace_s())
            self._actions.announce(number)
            self._announced.set()
            self._actions.report(number)
        except Exception:  # a failing report must not block the stop
            self._given_s = self._given_s or budget_s(20.0)
            logger.exception("The stop could not be reported.")
        finally:
            self._announced.set()

    def _end_at_once(self, reason: str) -> NoReturn:
        try:
            self._actions.end_at_once(self.number, reason)
        finally:
            os._exit(128 + self.number)
