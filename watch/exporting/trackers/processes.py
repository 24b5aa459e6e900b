"""Run `watch`'s experiment trackers, each in a separate process that reads the store like any reader.

    with trackers(run, node_rank=0, events=events) as tracked:
        tracked.poll()                       # at each tick: restart processes that died, a few times

Section `trackers` of the configuration names them (`to = ["tensorboard", "wandb"]`). Only the first node's watch starts
them: one connection per run. They are separate processes because W&B's library starts threads, an exit handler and a
server. Watch waits for them only at the end of the run, for at most `CLOSE_S`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from probes.attach.launch.own_process import own_process
from probes.settings.section import read
from probes.settings.sections import TrackersSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir

__all__ = ["TrackerProcesses", "trackers"]

CLOSE_S = 60.0
"""Seconds that a tracker has to write the end of a run."""
RETRY_S = (5.0, 60.0, 600.0)
"""Seconds before each restart of a tracker that died. After the last one it stays off."""


class _Process:
    """One tracker's process, with its number of failures."""

    def __init__(self, run: RunDir, name: str, events: EventWriter) -> None:
        self._run, self._name, self._events = run, name, events
        self._log = run.path / "logs" / f"tracker-{name}.log"
        self._failures = 0
        self._retry_at_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        command, environment = own_process("watch.exporting.trackers.follow", str(self._run.path), "--to", self._name)
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
                )
            self._events.write(event_kinds.TRACKER_STARTED, tracker=self._name, pid=self._process.pid)
        except OSError as error:
            self._failed(error.strerror or str(error))

    def poll(self) -> None:
        """Detect an exit, and restart the process after the pause."""
        if self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._failed(self._last_log_line() or f"exit code {code}", is_mistake=code == 2)
        elif self._failures <= len(RETRY_S) and time.monotonic() >= self._retry_at_s:
            self._start()

    def _failed(self, reason: str, *, is_mistake: bool = False) -> None:
        """Report a failure, and schedule a restart unless the cause is a user's mistake."""
        self.request_end()
        self._process = None
        self._failures = len(RETRY_S) + 1 if is_mistake else self._failures + 1
        if self._failures <= len(RETRY_S):
            self._retry_at_s = time.monotonic() + RETRY_S[self._failures - 1]
        self._events.write(event_kinds.TRACKER_FAILED, tracker=self._name, reason=reason)

    def _last_log_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - 2000))
                return log.read().decode(errors="replace").strip().rpartition("\n")[2][:300]
        except OSError:
            return ""

    def request_end(self) -> None:
        """Close the standard input of the process, so that the process writes the rest and exits."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                return

    def wait(self, deadline: float) -> None:
        """Wait until the process has exited; kill it at the deadline."""
        if self._process is None:
            return
        try:
            code = self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            command = f"rankscope export {self._run.path} --to {self._name}"
            reason = f"not finished {CLOSE_S:.0f} s after the run: write it with {command}"
            self._events.write(event_kinds.TRACKER_FAILED, tracker=self._name, reason=reason)
            return
        if code:
            self._events.write(
                event_kinds.TRACKER_FAILED, tracker=self._name, reason=self._last_log_line() or f"exit code {code}"
            )
        else:
            self._events.write(event_kinds.TRACKER_FINISHED, tracker=self._name)


class TrackerProcesses:
    """All tracker processes of a run."""

    def __init__(self, run: RunDir, names: Sequence[str], events: EventWriter) -> None:
        self._processes = [_Process(run, name, events) for name in dict.fromkeys(names)]

    def poll(self) -> None:
        """Restart processes that died. Called once a tick; never waits."""
        for process in self._processes:
            process.poll()

    def close(self) -> None:
        """Let all of them write the end of the run, in parallel. A second call does nothing."""
        deadline = time.monotonic() + CLOSE_S
        ending, self._processes = self._processes, []
        for process in ending:
            process.request_end()
        for process in ending:
            process.wait(deadline)


@contextmanager
def trackers(run: RunDir, node_rank: int, events: EventWriter) -> Iterator[TrackerProcesses]:
    """Run the configured trackers until the block ends, on the first node only."""
    found = TrackerProcesses(run, read(TrackersSettings, run.manifest()).to if node_rank == 0 else (), events)
    try:
        yield found
    finally:
        found.close()
