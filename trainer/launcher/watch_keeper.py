"""Keep the `watch` of a node alive: start it again when it has died, has been stopped, or dies again and again.

    keeper = WatchKeeper(run, node, events)
    keeper.check()            # several times a second
    keeper.end()              # after the run: wait for its last ingestion

A watch loses nothing by being killed: what it writes is made from the tapes. One that does not answer for `SILENT_S` by
this process's monotonic clock (a SIGSTOP, a dead file system) is killed and replaced. One that has ended
`MAX_QUICK_ENDS` times within `QUICK_END_S` of its start is started without exporters: what a user configured there must
not cost the hang handling.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from probes.attach.watch_process import start_watch
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from store import is_watched
from trainer.launcher.node import Node

__all__ = ["WatchKeeper"]

WATCH_END_S = 60.0
"""How long the last ingestion may take before the run is reported without it (it is caught up by any reader)."""
RESTART_S = 2.0
MAX_RESTART_S = 60.0
SILENT_S = 15.0
"""A tick takes a second, the analysis of a hang on a busy machine a few."""
STARTING_S = 90.0
"""The same before the first sign of life: imports, the store, a busy machine."""
QUICK_END_S = 30.0
MAX_QUICK_ENDS = 3


class WatchKeeper:
    """The watch process of one node."""

    def __init__(self, run: RunDir, node: Node, events: EventWriter) -> None:
        self.run, self.node, self._events = run, node, events
        self.ending = False
        self._quick_ends = 0
        self._heartbeat_fd = -1
        self.process: subprocess.Popen[bytes] = self._start()

    @property
    def is_bare(self) -> bool:
        """True once exporters are left out, because the watch ended again and again."""
        return self._quick_ends >= MAX_QUICK_ENDS

    def check(self) -> None:
        """Replace the watch if it has died or does not answer any more."""
        if self.ending:
            return
        now = time.monotonic()
        if self._has_beaten():
            self._answered_at, self._limit_s = now, SILENT_S
        if self.process.poll() is None:
            if now - self._answered_at > self._limit_s:
                self._kill()
                self._replace(f"It did not answer for {now - self._answered_at:.0f} s.")
            return
        lived_s = now - self._started_at
        if lived_s < min(RESTART_S * 2**self._quick_ends, MAX_RESTART_S):
            return
        self._quick_ends = self._quick_ends + 1 if self._ended_quickly() else 0
        self._replace(f"It ended with exit code {self.process.returncode}.")

    def end(self, *, stop: bool = False) -> None:
        """Wait for the last ingestion, or end the watch where that takes too long. `stop`: the end of the run is not
        an event that it would read, so it is asked to stop."""
        if self.ending:
            return
        self.ending = True
        if stop:
            self.process.terminate()
        deadline = time.monotonic() + WATCH_END_S
        while time.monotonic() < deadline:  # it leaves by itself once it has seen `run_ended`
            if self.process.poll() is not None or self._has_left_the_store():
                break
            time.sleep(0.02)
        else:
            self._kill()
        self._close_pipe()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = self._answered_at = time.monotonic()
        self._limit_s = STARTING_S
        self._close_pipe()
        self._heartbeat_fd, theirs = os.pipe()
        os.set_blocking(self._heartbeat_fd, False)
        try:
            return start_watch(
                self.run.path,
                self.node.rank,
                os.getpid(),
                num_nodes=self.node.max_nodes,
                digests=self.node.endpoint,
                options=["--bare"] if self.is_bare else [],
                heartbeat_fd=theirs,
            )
        finally:
            os.close(theirs)

    def _replace(self, reason: str) -> None:
        log = self.run.path / "logs" / f"watch-node{self.node.rank}.log"
        more = " It is started without exporters." if self.is_bare else ""
        pid, self.process = self.process.pid, self._start()
        self._events.write(event_kinds.WATCH_REPLACED, pid=pid, reason=f"{reason}{more} See {log.name}.")

    def _ended_quickly(self) -> bool:
        return self._answered_at - self._started_at < QUICK_END_S

    def _has_beaten(self) -> bool:
        """Return True if a sign of life came since the last call."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._heartbeat_fd, 1 << 16))
        return False

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _close_pipe(self) -> None:
        if self._heartbeat_fd >= 0:
            os.close(self._heartbeat_fd)
            self._heartbeat_fd = -1

    def _has_left_the_store(self) -> bool:
        """It may stay a little longer, to be scraped once more."""
        if is_watched(self.run.stores()):
            return False
        events = read_events(self.run.node_dir(self.node.rank) / "events.jsonl")[0]
        return any(
            event["kind"] == event_kinds.WATCH_STOPPED and event.get("pid") == self.process.pid for event in events
        )
