"""Take stacks on a hang and kill the culprit, so that the launcher restarts the ranks.

    culprits = CulpritKiller(run, events, may_kill=True)
    culprits.act(verdicts, attempt, processes, local_ranks, hang_is_open=True)     # once a tick

A watch kills only ranks of its node. A culprit on another node is left to that node's watch, and if the culprits have
already exited, the waiting ranks may notice that by themselves. If the hang lasts longer than `OTHERS_S`, this watch
kills the ranks of its node, which also restarts the job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence, Set

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from watch.digests.link import Verdict
from watch.live_tapes import RankProcess
from watch.processes import is_alive, is_process_of, kill, os_state
from watch.stacks.gil_holders import gil_holders
from watch.stacks.recorder_dumps import take_dumps
from watch.stacks.signal_dump import take_stacks

__all__ = ["CulpritKiller", "kill_stale"]

OTHERS_S = 15.0
"""Seconds that other nodes have to handle a hang if its culprit does not run on this node."""


class CulpritKiller:
    """Acts once per culprit and attempt. `may_kill` is False if recovery is turned off: then only stacks are taken."""

    def __init__(self, run: RunDir, events: EventWriter, *, may_kill: bool) -> None:
        self._run, self._events, self._may_kill = run, events, may_kill
        self._handled: set[tuple[int, int]] = set()  # (attempt, rank)
        self._left_to_others: tuple[int, float, str] | None = None  # attempt, start (monotonic) and reason to kill

    def act(
        self,
        verdicts: Sequence[Verdict],
        attempt: int,
        processes: Mapping[int, RankProcess],
        local_ranks: Set[int],
        *,
        hang_is_open: bool,
    ) -> None:
        """Kill the ranks that the verdicts blame, if they run on this node. The verdicts of an open hang are passed at
        each tick.

        `processes`: {rank: process} of this node's ranks that have not closed; `local_ranks`: also the closed ones.
        """
        blamed = {rank for verdict in verdicts for rank in verdict.ranks}
        culprits = blamed & processes.keys()
        # Check each process before signalling it: the pid of a dead rank may have been reused, and in a copied run the
        # recorded pids belong to the original's ranks.
        pids = (
            {rank: process.pid for rank, process in processes.items() if process.is_alive}
            if verdicts or hang_is_open
            else {}
        )
        pids = {rank: pid for rank, pid in pids.items() if is_process_of(self._run.path, pid)}
        reason = verdicts[0].summary if verdicts else ""
        if not culprits and blamed:
            # No blamed rank is still running here. Blamed ranks of this node have ended, and then the summary of the
            # hang is the reason for a restart. Otherwise a rank on another node hangs.
            overdue_reason = (
                "A rank hangs on another node, and its `watch` has not acted." if blamed - local_ranks else reason
            )
            self._left_to_others = self._left_to_others or (attempt, time.monotonic(), overdue_reason)
            if (attempt, NODE_RANK) not in self._handled:
                self._handled.add((attempt, NODE_RANK))
                self._take_stacks(attempt, pids)
        elif not culprits and verdicts:  # the hang is certain, but no rank is to blame: restart all ranks
            culprits = set(processes)
        if overdue := self._overdue(attempt, hang_is_open=hang_is_open):
            culprits, reason = culprits or set(processes), overdue or reason
        culprits = {rank for rank in culprits if (attempt, rank) not in self._handled}
        if not culprits:
            return
        self._take_stacks(attempt, pids, {rank: pids[rank] for rank in culprits & pids.keys()})
        self._handled |= {(attempt, rank) for rank in culprits}
        for rank in sorted(culprits & pids.keys()) if self._may_kill else ():
            if kill(pids[rank], signal.SIGKILL):
                self._events.write(event_kinds.CULPRIT_KILLED, killed_rank=rank, pid=pids[rank], reason=reason)

    def _take_stacks(self, attempt: int, pids: Mapping[int, int], culprits: Mapping[int, int] | None = None) -> None:
        """Have all ranks of this node write their stacks, and check whether a culprit ({rank: pid}) holds the GIL."""
        # Dumping the stacks of all threads may crash a process. So this is done only if the ranks are killed anyway.
        is_restart = self._may_kill and culprits is not None
        taken = take_stacks(self._run, attempt, pids, all_threads=is_restart)
        if dumped := take_dumps(self._run, attempt, pids):
            self._events.write(event_kinds.RECORDER_DUMPS, path="dumps", ranks=dumped)
        running = {rank: pid for rank, pid in (culprits or {}).items() if os_state(pid)[0] not in ("T", "t")}
        path = str(self._run.stacks.relative_to(self._run.path))
        self._events.write(event_kinds.STACKS, path=path, ranks=taken, gil_ranks=gil_holders(running))

    def _overdue(self, attempt: int, *, hang_is_open: bool) -> str:
        """A hang may be left to the watches of other nodes. If such a hang has lasted too long, return the reason for
        acting on it here; otherwise ""."""
        if self._left_to_others is None:
            return ""
        hang_attempt, since_s, reason = self._left_to_others
        if hang_attempt != attempt or not hang_is_open:
            self._left_to_others = None
            return ""
        return reason if time.monotonic() - since_s > OTHERS_S else ""


def kill_stale(run: RunDir, stale: Iterable[tuple[int, int, int, int]], events: EventWriter) -> None:
    """Kill processes of older attempts. They are already fenced, but occupy memory and a device."""
    for attempt, rank, pid, start_ticks in stale:
        is_here = start_ticks and is_alive(pid, start_ticks) and is_process_of(run.path, pid)
        if is_here and kill(pid, signal.SIGKILL):
            events.write(event_kinds.STALE_KILLED, killed_rank=rank, pid=pid, killed_attempt=attempt)
