"""CPU use of a step: CPU time of the process, run-queue delay of its thread, major page faults.

    time = CoreTime()
    time.begin()
    ...                       # a training step
    time.end()                # CoreUse(cpu_ns=41_000_000, run_delay_ns=350_000, major_faults=0)

This corroborates wall times: if a rank's wall time grows but its CPU time does not, it does not compute more; another
process has its core, or it waits for a disk. The kernel counts for each thread how long it was ready to run but had to
wait (`/proc/thread-self/schedstat`). The counter of the thread that runs the steps is read, which takes some
microseconds per step.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from typing import NamedTuple

from ..tape.files.checked_descriptor import moved_up
from ..tape.format.schema import UNSET

__all__ = ["CoreTime", "CoreUse"]

_NONE = int(UNSET["i64"])
_SCHEDSTAT = "/proc/thread-self/schedstat"
_usage, _SELF = resource.getrusage, resource.RUSAGE_SELF
_monotonic_ns = time.monotonic_ns
_SAME_MOMENT_NS = 50_000
"""A step that begins this soon after the previous end reuses its readings, to save system calls."""


class CoreUse(NamedTuple):
    """CPU use over one step. `run_delay_ns` is UNSET if the kernel does not report it."""

    cpu_ns: int
    run_delay_ns: int
    major_faults: int


class CoreTime:
    """Reads the kernel's counters at the start and the end of a step."""

    __slots__ = ("_descriptor", "_faults", "_read_ns", "_seconds", "_thread", "_waited_ns")

    def __init__(self) -> None:
        self._thread = 0
        self._descriptor = -1
        self._seconds = 0.0
        self._faults = 0
        self._waited_ns = _NONE
        self._read_ns = -_SAME_MOMENT_NS

    def begin(self) -> None:
        """Read the counters at the start of a step, in the thread that runs it."""
        if self._thread != threading.get_ident():
            self._open()
        elif _monotonic_ns() - self._read_ns < _SAME_MOMENT_NS:
            return
        self._waited_ns = self._read_waited_ns()
        usage = _usage(_SELF)
        self._seconds, self._faults = usage.ru_utime + usage.ru_stime, usage.ru_majflt

    def end(self) -> CoreUse:
        """Return the use since `begin`."""
        usage = _usage(_SELF)
        waited_ns = self._read_waited_ns() if self._waited_ns != _NONE else _NONE
        seconds, faults = usage.ru_utime + usage.ru_stime, usage.ru_majflt
        use = CoreUse(
            round((seconds - self._seconds) * 1e9),
            waited_ns - self._waited_ns if waited_ns != _NONE else _NONE,
            faults - self._faults,
        )
        # The readings also serve as the start of a step that begins now, unless the thread has changed or reading has
        # failed.
        if self._thread == threading.get_ident() and (waited_ns != _NONE or self._descriptor < 0):
            self._seconds, self._faults, self._waited_ns, self._read_ns = seconds, faults, waited_ns, _monotonic_ns()
        return use

    def close(self) -> None:
        """Close the kernel's file."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # the script has closed the descriptor
                os.close(self._descriptor)
        self._descriptor = -1
        self._thread = 0

    def _open(self) -> None:
        """Open the counters of the calling thread; the file always shows the thread that opened it."""
        self.close()
        self._thread = threading.get_ident()
        try:
            self._descriptor = moved_up(os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._descriptor = -1  # this is not Linux, or the kernel has no schedstat

    def _read_waited_ns(self) -> int:
        if self._descriptor < 0:
            return _NONE
        try:
            return int(os.pread(self._descriptor, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return _NONE
