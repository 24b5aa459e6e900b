"""Runs a program that is not Python, and records its NCCL calls through the profiler plugin.

    python -m rankscope.attached_program ./a.out --size 1e9      # what `rankscope run --no-python` starts as each rank

The program is a child process with the rank's environment. Signals are passed on, and it dies with this process. No
library, not even torch, is loaded in either process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["main"]

logger = logging.getLogger("rankscope.probes")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(words: list[str]) -> int:
    """Run the program and return its exit code. If a signal ended the program, this process ends itself with the same
    signal."""
    from rankscope.probes.attach.launch.identity import Identity
    from rankscope.probes.attach.launch.parent_death import end_with_launcher, signal_at_parent_death
    from rankscope.probes.fail_open import failing_open, probes_disabled

    record = None
    if not probes_disabled():
        with failing_open("attached_program"):
            record = _Record(Identity.from_environment(), words)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrived while the program was being started

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    ignored = [number for number in PASSED_ON if signal.signal(number, pass_on) == signal.SIG_IGN]

    def before_exec() -> None:
        signal_at_parent_death(signal.SIGKILL)
        for number in ignored:  # `exec` would restore the default action, which ends a program under nohup
            signal.signal(number, signal.SIG_IGN)

    try:
        child = subprocess.Popen(words, preexec_fn=before_exec)
    except OSError as error:
        sys.exit(f"rankscope: cannot run {words[0]}: {error.strerror}")
    for number in early:
        child.send_signal(number)
    launcher_pid = end_with_launcher()
    if record is not None:
        with failing_open("attached_program"):
            record.started(child.pid, launcher_pid)
    code = child.wait()
    if record is not None:
        with failing_open("attached_program"):
            record.ended(code)
    if code < 0:  # the program died of a signal: die of the same one, so that the parent sees how it ended
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


class _Record:
    """Writes the events of a rank whose calls the plugin records."""

    def __init__(self, identity: Any, words: list[str]) -> None:
        from rankscope.probes.attach.attached_config import attached_config
        from rankscope.probes.attach.launch.identity import launcher_pid
        from rankscope.probes.attach.launch.joining import join_run
        from rankscope.probes.collectives.nccl_plugin.loading import load_plugin
        from rankscope.probes.tape.events import EventWriter

        self._identity = identity
        manifest = {
            "config": attached_config({}),
            "attached": True,
            "world_size": identity.world_size,
            "launcher_pid": launcher_pid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
            "command": words,
            "cwd": os.getcwd(),
        }
        named = os.environ.get("RANKSCOPE_RUN_DIR")
        self._run, attempt, _ = join_run(
            identity,
            runs_dir=Path("runs"),
            name=os.environ.get("RANKSCOPE_RUN_NAME", "") or Path(words[0]).stem,
            manifest=manifest,
            run_dir=Path(named) if named else None,
        )
        directory = self._run.rank_dir(attempt, identity.rank)
        directory.mkdir(parents=True, exist_ok=True)
        self._events = EventWriter(directory / "events.jsonl", attempt=attempt, rank=identity.rank)
        self._loading = load_plugin(directory, rank=identity.rank, attempt=attempt)
        if self._loading.should_log and identity.local_rank == 0:
            logger.warning("NCCL calls are not recorded: %s", self._loading.reason)

    def started(self, pid: int, launcher_pid: int) -> None:
        """Write the rank's identity, and start a watch next to the first rank of each node."""
        from rankscope.probes.attach.launch.watch_process import digest_address, start_detached_watch
        from rankscope.probes.attach.retention_line import print_retention
        from rankscope.probes.tape import event_kinds
        from rankscope.probes.tape.attempts import start_ticks

        identity = self._identity
        self._events.write(
            event_kinds.RANK,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            node_rank=identity.node_rank,
            host=socket.gethostname(),
            pid=pid,
            start_ticks=start_ticks(pid),
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
        )
        self._events.write(event_kinds.NCCL_PLUGIN, state=self._loading.state, reason=self._loading.reason or None)
        if identity.rank == 0:
            self._events.write(event_kinds.ATTEMPT_STARTED, world_size=identity.world_size)
        if identity.local_rank == 0:
            self._events.write(
                event_kinds.RUN_STARTED, node_rank=identity.node_rank, nproc_per_node=identity.node_size()
            )
            num_nodes, digests = digest_address()
            start_detached_watch(self._run.path, identity.node_rank, launcher_pid, num_nodes=num_nodes, digests=digests)
            print_retention(self._run, identity)

    def ended(self, code: int) -> None:
        """Write the end of a successful program; a failed one has no end event, like a rank that died."""
        from rankscope.probes.tape import event_kinds

        if code == 0:
            if self._identity.local_rank == 0:
                node_rank = self._identity.node_rank
                self._events.write(event_kinds.RUN_ENDED, node_rank=node_rank, reason="finished", exit_code=0)
            self._events.write(event_kinds.RANK_CLOSED, probe_errors={}, dropped_records={})
        self._events.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("rankscope.attached_program: name a program and its arguments")
    sys.exit(main(sys.argv[1:]))
