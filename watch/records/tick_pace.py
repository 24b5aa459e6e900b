"""Pace and priority of the store's writer, which must leave CPU cores to the ranks.

    pace = TickPace()
    yield_to_ranks()                          # in the thread that writes the store
    while not stop.is_set():
        with pace.round():
            ...
        pace.rest(stop, is_eager=lambda: ...)

A round has a fixed cost, however few records there are: DuckDB opens the file, plans some fifty queries and commits. So
on small machines there are fewer rounds with more records each: rounds use at most `CORE_SHARE` of the cores, with at
most `MAX_REST_S` between them. Rounds begin every second on machines with many cores, and on any machine in the first
seconds, at a new attempt, after the end of a rank, and while nothing is recorded.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["TICK_S", "TickPace", "yield_to_ranks"]

TICK_S = 1.0
MIN_REST_S = 0.05
MAX_REST_S = 8.0
CORE_SHARE = 0.01
"""Share of the CPU time available to this process."""
NICENESS = 5
"""Niceness of the thread. When the cores are busy, it gets a third of the share of a process with niceness 0: less than
the ranks, but enough to make progress.
"""


class TickPace:
    """Pace of one thread. `num_cores`: number of cores that this process may use."""

    def __init__(self, *, num_cores: int | None = None) -> None:
        self.num_ticks = 1
        """Seconds covered by the current round: since the start of the previous one."""
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._begin_s: float | None = None
        self._cpu_s = 0.0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Measure the CPU time of the round in the block."""
        now_s, cpu_s = time.monotonic(), time.thread_time()
        if self._begin_s is not None:
            self.num_ticks = max(1, round((now_s - self._begin_s) / TICK_S))
        self._begin_s = now_s
        try:
            yield
        finally:
            self._cpu_s = time.thread_time() - cpu_s

    def rest(self, stop: threading.Event, *, is_eager: Callable[[], bool]) -> None:
        """Wait until the next round is due or `stop` is set. While `is_eager` returns True, a round is due every
        second.
        """
        due_s = (self._begin_s or 0.0) + self.period_s()
        while not stop.wait(max(MIN_REST_S, min(TICK_S, due_s - time.monotonic()))):
            if time.monotonic() >= due_s or is_eager():
                return

    def period_s(self) -> float:
        """Seconds from the start of the last round to the start of the next."""
        return min(MAX_REST_S, max(TICK_S, self._cpu_s / (CORE_SHARE * self._num_cores)))


def yield_to_ranks() -> None:
    """Give the calling thread, and threads that it starts, a lower priority than the ranks, if the system supports
    that.

    With SCHED_BATCH, this thread does not preempt a computing rank when it wakes up. The main thread, which detects
    hangs and ingests the last records, keeps its priority. Niceness has no effect if the kernel first divides the cores
    between sessions (autogroups).
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
