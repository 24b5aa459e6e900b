"""The rank processes of one node: start, poll, stop.

    ranks = RankProcesses(logs, arguments=["--fault", "kill@step=20"], zygote=zygote)
    ranks.start(attempt=0, environments={0: {...}, 1: {...}})       # by local rank; {0: pid, 1: pid}
    ranks.exit_codes()                # {0: None, 1: -9}: None while it runs, negative for a signal
    ranks.wait_for_exiting(5.0)       # wait for processes that the kernel has begun to end
    ranks.stop(signal.SIGTERM, 30.0)  # then SIGKILL; returns when all have ended

What a rank prints goes to `logs/attempt-<a>/rank-<rank>.out.log` and `.err.log` of the run's folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from probes.attach.launch.own_process import own_process
from probes.tape.pauses import rest
from trainer.exit_codes import EXIT_FAILED
from trainer.launcher.processes.shortage import shortage
from trainer.launcher.processes.zygote import Zygote, ZygoteError

__all__ = ["UNKNOWN_EXIT", "RankProcesses"]

logger = logging.getLogger("torch.distributed.elastic.rankscope")  # goes where the launcher's own log goes
POLL_S = 0.02
UNKILLABLE_S = 30.0
"""Seconds that a killed process may take to end. In an uninterruptible wait in a driver it may never end; it is then
left behind.
"""
UNKNOWN_EXIT = 255
_PF_EXITING = 0x4
"""The kernel's flag for an exiting process. The connections of such a process may be closed before it can be waited
for."""


class RankProcesses:
    """All methods but `kill` are called from the launcher's main thread."""

    def __init__(self, logs: Path, *, arguments: Sequence[str], zygote: Zygote | None = None) -> None:
        self.logs = logs
        self.arguments = [*arguments]
        self.ranks: tuple[int, ...] = ()
        """Global ranks of the processes of the newest attempt."""
        self.not_started: dict[int, str] = {}
        """{local rank of the newest attempt: what the machine had too little of to start it}."""
        self.zygote = zygote
        """Forks the ranks; None: each is a new interpreter."""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int | None] = {}
        self._was_killed: set[int] = set()
        self._interpreters: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *, attempt: int, environments: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Start the ranks of an attempt; returns {local rank: pid}. A rank for which the machine has too few processes,
        files or memory has pid 0, and has failed like one that ended at once; later ranks are then not started.
        """
        self._pids, self._codes, self._interpreters = {}, {}, {}
        self._was_killed, self.not_started = set(), {}
        self.ranks = tuple(int(variables["RANK"]) for variables in environments.values())
        folder = self.logs / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        for local_rank, variables in environments.items():
            logs = [folder / f"rank-{int(variables['RANK']):05d}.{stream}.log" for stream in ("out", "err")]
            try:
                self._pids[local_rank] = self._start(local_rank, {**os.environ, **variables}, logs[0], logs[1])
                self._codes[local_rank] = None
            except OSError as error:
                if not (why := shortage(error)):
                    raise
                logger.warning("rank %s cannot be started: %s", variables["RANK"], error)
                self.not_started[local_rank] = why
                self._codes[local_rank], self._pids[local_rank] = EXIT_FAILED, 0  # the code first: 0 is no pid to kill
                break
        return dict(self._pids)

    def exit_codes(self) -> dict[int, int | None]:
        """{local rank: exit code}, negative for a signal, None while it runs."""
        for local_rank, code in self._codes.items():
            if code is None:
                self._codes[local_rank] = self._poll(local_rank)
        return dict(self._codes)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all to end; False if one still runs after `timeout_s` in which this process ran."""
        deadline = time.monotonic() + timeout_s
        while None in self.exit_codes().values():
            if time.monotonic() >= deadline:
                return False
            deadline += rest(POLL_S)
        return True

    def wait_for_exiting(self, timeout_s: float) -> None:
        """Wait for processes that are exiting. One of them may be the rank that made its peers fail, and its exit code
        must become known."""
        deadline = time.monotonic() + timeout_s
        while any(code is None and _is_exiting(self._pids[rank]) for rank, code in self.exit_codes().items()):
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_S / 10)

    def was_killed(self, local_rank: int) -> bool:
        """Return True if `stop` had to kill it: SIGTERM did not end it in time."""
        return local_rank in self._was_killed

    def kill(self) -> None:
        """Kill all running processes without waiting. May be called from another thread."""
        for local_rank, pid in [*self._pids.items()]:
            if self._codes.get(local_rank) is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def stop(self, number: signal.Signals, timeout_s: float) -> None:
        """Signal all running processes, and after `timeout_s` kill the remaining ones."""
        for sent, patience_s in ((number, timeout_s), (signal.SIGKILL, UNKILLABLE_S)):
            for local_rank, code in self.exit_codes().items():
                if code is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._pids[local_rank], sent)
                    if sent == signal.SIGKILL:
                        self._was_killed.add(local_rank)
            if self.wait(patience_s):
                return
        unkillable = sorted(rank for rank, code in self._codes.items() if code is None)
        logger.error("local ranks %s cannot be killed: their node may need a restart", unkillable)
        for local_rank in unkillable:
            self._codes[local_rank] = -signal.SIGKILL

    def _start(self, local_rank: int, environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        if self.zygote is not None:
            try:
                return self.zygote.fork(arguments=self.arguments, environment=environment, stdout=stdout, stderr=stderr)
            except ZygoteError as error:
                logger.warning("%s; ranks are started as new interpreters", error)
                self.zygote.close()
                self.zygote = None
        command, environment = own_process("trainer.rank.worker", *self.arguments, environment=environment)
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=environment,
            )
        self._interpreters[local_rank] = process
        return process.pid

    def _poll(self, local_rank: int) -> int | None:
        if process := self._interpreters.get(local_rank):
            return process.poll()
        try:
            pid, status = os.waitpid(self._pids[local_rank], os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN_EXIT  # already reaped elsewhere
        return os.waitstatus_to_exitcode(status) if pid else None


def _is_exiting(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may contain spaces
        return bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False  # already reaped, or this is not Linux
