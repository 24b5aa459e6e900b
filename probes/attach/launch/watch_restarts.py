"""Restart the `watch` of a node when it has died, does not respond, or exits repeatedly.

    watch = WatchRestarts(run, node_rank, events, start)     # start(heartbeat_fd, options) -> its process
    watch.check()                                            # every few seconds

Killing a watch loses nothing, because everything it writes is derived from the tapes. A watch that does not answer for
`SILENT_S` while this process runs (a SIGSTOP, a dead file system) is killed and replaced. If a watch has ended
`MAX_QUICK_ENDS` times within `QUICK_END_S` of its start, it is started without exporters: a wrong configuration of
exporters must not disable hang handling.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Collection, Sequence

from ...tape import event_kinds
from ...tape.events import EventWriter
from ...tape.rundir import RunDir

__all__ = ["WatchRestarts"]

logger = logging.getLogger("rankscope.watch")
RESTART_S = 2.0
MAX_RESTART_S = 60.0
SILENT_S = 15.0
"""Maximum seconds between heartbeats. A watch sends one after each tick: once a second, or every few seconds if it
judges a hang on a busy machine."""
STARTING_S = 90.0
"""Silence allowed before the first heartbeat (imports, the store, a busy machine). Doubled after each start without a
heartbeat, because on a very busy machine a fixed limit would kill every new watch."""
MAX_STARTING_S = 720.0
UNSEEN_S = 5.0
"""Maximum seconds between two checks that count as silence of the watch. In a longer gap this process did not run
either, because the job or the machine was suspended, and neither did its watch."""
KILL_S = 1.0
"""Seconds to wait for the end of a killed watch; short, because the launcher must also supervise ranks."""
WATCHED_ALREADY = 2
"""Exit code of a watch that found another watch running."""
QUICK_END_S = 30.0
MAX_QUICK_ENDS = 3


class WatchRestarts:
    """The watch process of one node, which is a child of this one."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int,
        events: EventWriter,
        start: Callable[[int, Sequence[str]], subprocess.Popen[bytes]],
        *,
        final: Collection[int] = (),
        is_watched: Callable[[], bool] = lambda: False,
    ) -> None:
        """`final`: exit codes after which the watch is not restarted. `is_watched()`: True if another watch writes the
        store."""
        self._final, self._is_watched = final, is_watched
        self._run, self._node_rank, self._events, self._start_process = run, node_rank, events, start
        self.num_quick_ends = 0
        """Consecutive exits of the watch soon after its start."""
        self._num_silent_starts = 0
        self._started_at = self._checked_at = self._unseen_s = 0.0
        self._heartbeat_fd = -1
        self.process: subprocess.Popen[bytes] = self._start()

    @property
    def is_bare(self) -> bool:
        """True once the watch has ended so often that it is started without exporters."""
        return self.num_quick_ends >= MAX_QUICK_ENDS

    @property
    def is_over(self) -> bool:
        """True once the watch has ended and will not be restarted."""
        return self.process.poll() in self._final

    def check(self) -> None:
        """Replace the watch if it has died or does not answer any more."""
        try:
            self._check()
        except OSError as error:  # for example out of memory, or at the limit of processes; the next call tries again
            logger.warning("watch cannot be started: %s", error)

    def _check(self) -> None:
        now = time.monotonic()
        self._unseen_s += max(0.0, now - self._checked_at - UNSEEN_S)
        self._checked_at = now
        if self._has_beaten():
            self._answered_at, self._unseen_s, self._limit_s, self._num_silent_starts = now, 0.0, SILENT_S, 0
        if self.process.poll() is None:
            silent_s = now - self._answered_at - self._unseen_s
            if silent_s > self._limit_s:
                self.kill()
                if self.process.poll() is None:
                    return  # the process is not dead yet; the next check tries again
                self._num_silent_starts += self._answered_at == self._started_at
                self._replace(f"It did not answer for {silent_s:.0f} s.")
            return
        if self.is_over:
            return
        gave_way = self.process.returncode == WATCHED_ALREADY
        lived_s = now - self._started_at
        if lived_s < min(RESTART_S * 2**self.num_quick_ends, MAX_RESTART_S):
            return
        # If the user has started `rankscope watch` on this run, leave the run to it until it ends.
        if gave_way and self._is_watched():
            self._started_at = now
            return
        if not gave_way:
            self.num_quick_ends = self.num_quick_ends + 1 if self._ended_quickly() else 0
        self._replace(f"It ended with exit code {self.process.returncode}.")

    def kill(self) -> None:
        """Kill the watch and wait up to `KILL_S` for its end. Its end frees the lock. A watch that waits for a disk may
        take longer."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)

    def close(self) -> None:
        """Stop supervising; the watch continues."""
        if self._heartbeat_fd >= 0:
            os.close(self._heartbeat_fd)
            self._heartbeat_fd = -1

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = self._answered_at = self._checked_at = time.monotonic()
        self._unseen_s = 0.0
        self._limit_s = min(STARTING_S * 2**self._num_silent_starts, MAX_STARTING_S)
        self.close()
        self._heartbeat_fd, theirs = os.pipe()
        os.set_blocking(self._heartbeat_fd, False)
        try:
            return self._start_process(theirs, ["--bare"] if self.is_bare else [])
        finally:
            os.close(theirs)

    def _replace(self, reason: str) -> None:
        log = self._run.path / "logs" / f"watch-node{self._node_rank}.log"
        more = " It is started without exporters." if self.is_bare else ""
        pid, self.process = self.process.pid, self._start()
        self._events.write(event_kinds.WATCH_REPLACED, pid=pid, reason=f"{reason}{more} See {log.name}.")

    def _ended_quickly(self) -> bool:
        return self._answered_at - self._started_at < QUICK_END_S

    def _has_beaten(self) -> bool:
        """Return True if a heartbeat came since the last call."""
        if self._heartbeat_fd < 0:
            return False
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._heartbeat_fd, 1 << 16))
        return False
