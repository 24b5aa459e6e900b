"""Detect that ranks without new records are working: imports, compilers, or a large batch record nothing for minutes.

    work = SilentWork(events, floor_s=5.0)
    work.poll(pids, quiet_s=tapes.quiet_s)        # once a tick

While the ranks record, nothing is done. Once they are silent, the CPU time and the bytes read by each rank's process
tree are compared with earlier values, less often the longer the silence lasts. An event lists the working ranks when
they change, and every 30 s; `analyzers.run.live.stall_limits` uses it to extend the limits of silence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from analyzers.run.policy import StallPolicy
from probes.tape import event_kinds
from probes.tape.events import EventWriter

__all__ = ["SilentWork", "work_of_tree"]

PERIOD_RATIO = 0.1
"""Time between two comparisons, as a share of the silence so far."""
EVENT_S = 30.0
MAX_PROCESSES = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SilentWork:
    """Polled by one thread. `floor_s`: shortest silence that may be a hang; comparing starts at half of it."""

    def __init__(self, events: EventWriter, *, floor_s: float) -> None:
        self._events, self._floor_s, self._policy = events, floor_s, StallPolicy()
        self._before: tuple[float, dict[int, tuple[int, float, int]]] | None = None
        self._busy: list[int] = []
        self._written_s = float("-inf")

    def poll(self, pids: Mapping[int, int], *, quiet_s: float) -> bool:
        """Compare the processes ({rank: pid}) if they are silent. Returns True if an event was written."""
        now_s = time.monotonic()
        if quiet_s < self._floor_s / 2:
            self._before, self._busy, self._written_s = None, [], float("-inf")
            return False
        if self._before is not None and now_s - self._before[0] < max(self._floor_s / 8, PERIOD_RATIO * quiet_s):
            return False
        before, now = self._before, {rank: (pid, *work_of_tree(pid)) for rank, pid in pids.items()}
        self._before = (now_s, now)
        if before is None:
            return False
        passed_s = now_s - before[0]
        busy, cores = [], 0.0
        for rank, (pid, cpu_s, read_bytes) in now.items():
            pid_before, cpu_before_s, read_before = before[1].get(rank, (0, 0.0, 0))
            if pid_before != pid:
                continue
            used, read_per_s = (cpu_s - cpu_before_s) / passed_s, (read_bytes - read_before) / passed_s
            if used >= self._policy.busy_ratio or read_per_s >= self._policy.busy_read_bytes_per_s:
                busy.append(rank)
                cores += max(0.0, used)
        idle = [rank for rank in self._busy if rank not in busy]
        if busy == self._busy and (not busy or now_s - self._written_s < EVENT_S):
            return False
        self._busy, self._written_s = busy, now_s
        self._events.write(event_kinds.SILENT_WORK, ranks=busy, idle_ranks=idle, cores=round(cores, 2))
        return True


def work_of_tree(pid: int) -> tuple[float, int]:
    """CPU seconds and bytes read by a process and its descendants, including exited ones; 0 if the process has exited.

    This process does not count as a child: orphans such as `watch` become children of a rank that is PID 1.
    """
    cpu_ticks, read_bytes, waiting, seen = 0, 0, [pid], 0
    while waiting and seen < MAX_PROCESSES:
        folder, seen = Path(f"/proc/{waiting.pop()}"), seen + 1
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            # CPU time of the process (utime, stime), and of its children that have ended (cutime, cstime).
            cpu_ticks += sum(int(fields[index]) for index in (11, 12, 13, 14))
        except (OSError, IndexError, ValueError):
            continue
        try:
            read_bytes += int((folder / "io").read_text().partition("rchar: ")[2].split()[0])
        except (OSError, IndexError, ValueError):
            pass
        try:
            for task in (folder / "task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                waiting += [child for child in children if child != os.getpid()]
        except (OSError, ValueError):
            pass
    return cpu_ticks / _TICKS_PER_S, read_bytes
