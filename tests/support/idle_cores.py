"""Idle share of the cores that this process may use, so that no group of the suite waits while a core is idle.

cores = IdleCores()
cores.share()    # of the time since the call before: 0.0 when all were busy
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT = 3, 4
"""Columns of a core's line (man proc_stat)."""


class IdleCores:
    """Reads the kernel's ticks at each call."""

    def __init__(self, stat: Path = _STAT, cores: frozenset[int] | None = None) -> None:
        self._stat = stat
        self._cores = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        self._idle, self._all = self._read()

    def share(self) -> float:
        """From 0 to 1; 0 if the kernel does not report it, or no tick has passed."""
        idle_before, all_before = self._idle, self._all
        self._idle, self._all = self._read()
        passed = self._all - all_before
        return (self._idle - idle_before) / passed if passed > 0 else 0.0

    def _read(self) -> tuple[int, int]:
        idle = total = 0
        with contextlib.suppress(OSError):
            for line in self._stat.read_text().splitlines():
                name, *ticks = line.split()
                number = name.removeprefix("cpu")
                if number.isdecimal() and name != number and int(number) in self._cores:
                    counts = [int(tick) for tick in ticks[:8]]  # guest time is included in user time
                    idle += counts[_IDLE] + counts[_IOWAIT]
                    total += sum(counts)
        return idle, total
