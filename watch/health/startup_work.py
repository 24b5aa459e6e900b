"""Detect that ranks are working before their first step: imports, compilers and JIT builds record nothing for minutes.

    work = StartupWork(events)
    work.poll(pids, quiet_s=tapes.quiet_s, has_stepped=lambda: ...)        # once a tick

While the ranks record, nothing is done. Once they are silent, CPU time and bytes read of each rank's process tree are
compared every few seconds. An event lists the working ranks, and the start-up limit counts from that event
(`analyzers.run.live.stall_limits`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from analyzers.run.policy import StallPolicy
from probes.tape import event_kinds
from probes.tape.events import EventWriter

__all__ = ["StartupWork", "work_of_tree"]

QUIET_S = 20.0
PERIOD_S = 10.0
EVENT_S = 30.0
MAX_PROCESSES = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StartupWork:
    """Polled by one thread."""

    def __init__(self, events: EventWriter, policy: StallPolicy | None = None) -> None:
        self._events, self._policy = events, policy or StallPolicy()
        self._before: tuple[float, dict[int, tuple[int, float, int]]] | None = None
        self._written_s = float("-inf")

    def poll(self, pids: Mapping[int, int], *, quiet_s: float, has_stepped: Callable[[], bool]) -> None:
        """Compare the processes ({rank: pid}) if they are silent and have not finished a step."""
        now_s = time.monotonic()
        if quiet_s < QUIET_S:
            self._before = None
            return
        if self._before is not None and now_s - self._before[0] < PERIOD_S:
            return
        if has_stepped():
            return
        before, now = self._before, {rank: (pid, *work_of_tree(pid)) for rank, pid in pids.items()}
        self._before = (now_s, now)
        if before is None:
            return
        passed_s = now_s - before[0]
        busy, cores = [], 0.0
        for rank, (pid, cpu_s, read_bytes) in now.items():
            pid_before, cpu_before_s, read_before = before[1].get(rank, (0, 0.0, 0))
            if pid_before != pid:
                continue
            used, read_per_s = (cpu_s - cpu_before_s) / passed_s, (read_bytes - read_before) / passed_s
            if used >= self._policy.startup_busy_ratio or read_per_s >= self._policy.startup_read_bytes_per_s:
                busy.append(rank)
                cores += max(0.0, used)
        if busy and now_s - self._written_s >= EVENT_S:
            self._written_s = now_s
            self._events.write(event_kinds.STARTUP_WORK, ranks=busy, cores=round(cores, 2))


def work_of_tree(pid: int) -> tuple[float, int]:
    """CPU seconds and bytes read by a process and its children, including ended ones; 0 if the process has exited."""
    cpu_ticks, read_bytes, waiting, seen = 0, 0, [pid], 0
    while waiting and seen < MAX_PROCESSES:
        one, seen = waiting.pop(), seen + 1
        folder = Path(f"/proc/{one}")
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            # of the process, and of children it has waited for
            cpu_ticks += sum(int(fields[index]) for index in (11, 12, 13, 14))
        except (OSError, IndexError, ValueError):
            continue
        try:
            read_bytes += int((folder / "io").read_text().partition("rchar: ")[2].split()[0])
        except (OSError, IndexError, ValueError):
            pass
        try:
            for task in (folder / "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            pass
    return cpu_ticks / _TICKS_PER_S, read_bytes
