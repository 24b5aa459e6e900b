"""Keep the `watch` of a node alive while the launcher runs its ranks, and wait for its last ingestion.

    keeper = WatchKeeper(run, node, events)
    keeper.check()            # several times a second
    keeper.end()              # after the run: wait for its last ingestion

`probes.attach.launch.watch_restarts` defines when it is replaced.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from probes.attach.launch.watch_process import start_watch
from probes.attach.launch.watch_restarts import WatchRestarts
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.files.held_folder import HeldFolder
from probes.tape.pauses import rest
from probes.tape.rundir import RunDir
from store import is_watched
from trainer.launcher.node import Node

__all__ = ["WatchKeeper"]

WATCH_END_S = 60.0
"""Seconds that the last ingestion may take before the run is reported without it (any reader catches up)."""


class WatchKeeper:
    """The watch process of one node."""

    def __init__(self, run: RunDir, node: Node, events: EventWriter) -> None:
        self.run, self.node = run, node
        self.ending = False
        self._held = HeldFolder(run.path)
        store = run.store(node.rank)
        self._watch = WatchRestarts(run, node.rank, events, self._start, is_watched=lambda: is_watched([store]))

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The newest watch."""
        return self._watch.process

    @property
    def is_bare(self) -> bool:
        """True if exporters are left out because the watch ended repeatedly."""
        return self._watch.is_bare

    def check(self) -> None:
        """Replace the watch if it has died or stopped responding."""
        # If the folder was replaced, a new watch would write to the wrong one.
        if not self.ending and not self._held.problem():
            self._watch.check()

    def kill(self) -> None:
        """Kill the watch, since the launcher ends immediately; readers ingest the remaining records."""
        self.ending = True
        self._watch.kill()

    def end(self, *, stop: bool = False, within_s: float | None = None) -> None:
        """Wait for the last ingestion, or end the watch if that takes too long. `stop`: ask it to stop, because it will
        not see the run's end as an event. `within_s`: remaining time after a signal.
        """
        if self.ending:
            return
        self.ending = True
        if stop:
            self.process.terminate()
        deadline = time.monotonic() + (WATCH_END_S if within_s is None else min(WATCH_END_S, within_s))
        while time.monotonic() < deadline:  # it exits by itself when it has seen `run_ended`
            if self.process.poll() is not None or self._has_left_the_store():
                break
            deadline += rest(0.02)
        else:
            self._watch.kill()
        self._watch.close()

    def _start(self, heartbeat_fd: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
        return start_watch(
            self.run.path,
            self.node.rank,
            os.getpid(),
            num_nodes=self.node.max_nodes,
            digests=self.node.endpoint,
            options=options,
            heartbeat_fd=heartbeat_fd,
        )

    def _has_left_the_store(self) -> bool:
        """Return True if watch has released the store; it may continue to run for a last scrape."""
        if is_watched(self.run.stores()):
            return False
        events = read_events(self.run.node_dir(self.node.rank) / "events.jsonl")[0]
        return any(
            event["kind"] == event_kinds.WATCH_STOPPED and event.get("pid") == self.process.pid for event in events
        )
