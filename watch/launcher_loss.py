"""Handle a launcher that died without reporting it: record its death, end its ranks, and close the run.

    loss = LauncherLoss(tapes, events, node_rank=0, launcher_pid=4711, grace_s=20.0)
    loss.poll()                  # once a tick

The kernel sends each rank SIGTERM when its launcher dies (`probes.attach.launch.parent_death`). A rank that does not
exit, because it is stopped or blocked in C, is killed `MARGIN_S` after the grace period of a preemption. When no rank
is left, the end of the run is recorded as the launcher would have done.
"""

from __future__ import annotations

import signal
import time

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from watch.live_tapes import LiveTapes
from watch.processes import is_alive, is_process_of, kill, start_ticks

__all__ = ["LauncherLoss"]

MARGIN_S = 3.0


class LauncherLoss:
    """Watches the launcher of one node and ends its ranks when it has died.

    `launcher_pid` 0: the launcher is not Rankscope's, and its ranks are left alone.
    """

    def __init__(
        self, tapes: LiveTapes, events: EventWriter, *, node_rank: int, launcher_pid: int, grace_s: float
    ) -> None:
        self._tapes, self._events, self._node_rank = tapes, events, node_rank
        self._limit_s = grace_s + MARGIN_S
        self._pid, self._start_ticks = launcher_pid, start_ticks(launcher_pid)
        self._lost_at_s: float | None = None

    def poll(self) -> None:
        """Act if the launcher has died."""
        if not self._pid or self._tapes.has_ended:
            return
        if self._tapes.launcher_pid not in (0, self._pid):  # another launcher has resumed the run while this watch ran
            self._pid, self._lost_at_s = self._tapes.launcher_pid, None
            self._start_ticks = start_ticks(self._pid)
        if is_alive(self._pid, self._start_ticks):
            return
        processes = self._tapes.processes
        if self._lost_at_s is None:
            self._lost_at_s = time.monotonic()
            self._events.write(
                event_kinds.LAUNCHER_LOST, node_rank=self._node_rank, pid=self._pid, ranks=sorted(self._tapes.ranks)
            )
        alive = {
            rank: process
            for rank, process in processes.items()
            if process.is_alive and is_process_of(self._tapes.folder, process.pid)
        }
        if not alive:
            message = f"The launcher (process {self._pid}) was killed or crashed."
            self._events.write(
                event_kinds.RUN_ENDED,
                node_rank=self._node_rank,
                reason="launcher_lost",
                exit_code=None,
                message=message,
            )
        elif time.monotonic() - self._lost_at_s > self._limit_s:
            for rank, process in alive.items():
                if kill(process.pid, signal.SIGKILL):
                    self._events.write(
                        event_kinds.RANK_STOPPED, exit_rank=rank, pid=process.pid, exit_code=-signal.SIGKILL
                    )
