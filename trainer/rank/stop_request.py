"""Stop request of a rank (SIGTERM, SIGINT), and the time limit for complying with it.

    stop = StopRequest(grace_s=25.0, on_timeout=report)   # called just before the process leaves without a checkpoint
    stop()                          # polled once a step; the loop shares it with the other ranks

SIGTERM and SIGINT ask for the end of the step and a checkpoint; the same one again ends the process at once. Python
runs a signal's handler only when the main thread returns from C, which one that waits in a collective may never do:
the time is counted by a thread, which the C handler wakes through a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from trainer.checkpoint import attempt_fence as fence

__all__ = ["StopRequest"]

IMPATIENCE_S = 1.0
"""A signal that comes again after this long ends the process at once."""
FENCE_INTERVAL_S = 1.0
"""Between two checks whether a later attempt has taken the run; whatever is written is checked besides."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Installed once in a process, from its main thread."""

    def __init__(self, grace_s: float, on_timeout: Callable[[int], None]) -> None:
        self.signal = 0
        """The first signal that asked; 0 if none did."""
        self.grace_s = grace_s
        self._on_timeout = on_timeout
        self._received_at: dict[int, float] = {}
        self._fence_at = 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a data worker's signals are its own
        threading.Thread(target=self._count_down, args=(reader,), name="grace", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._received)

    def __call__(self) -> bool:
        if time.monotonic() >= self._fence_at:
            self._fence_at = time.monotonic() + FENCE_INTERVAL_S
            fence.check()
        return self.signal != 0

    def _received(self, number: int, frame: FrameType | None) -> None:
        # A launcher passes its own signal on, so the first of another kind, or one right after, is the same request.
        now = time.monotonic()
        if now - self._received_at.setdefault(number, now) > IMPATIENCE_S:
            os._exit(128 + number)
        self.signal = self.signal or number

    def _count_down(self, reader: int) -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass  # watch's request for stacks, or another signal that has a handler
        time.sleep(self.grace_s)
        try:
            self._on_timeout(number)
        finally:
            os._exit(128 + number)
