"""Supervise a `watch` under other launchers: restart it after a kill, stop or crash.

    python -m probes.attach.launch.watch_guard RUN NODE_RANK LAUNCHER_PID NUM_NODES DIGESTS  # `start_detached_watch`

It is a process instead of a thread of the rank, so that it costs no training time, and works while the rank hangs
holding the GIL and across restarts of the ranks. It imports only the standard library.

It exits in four cases: its watch ended by itself (the run is over, or the watch was asked to stop); another watch of
the node, which a later attempt has started, already has the store; the run's folder was deleted; or the watch crashed
`MAX_ENDS` times in a row.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...tape.attempts import newest
from ...tape.events import EventWriter
from ...tape.rundir import NODE_RANK, RunDir
from .watch_process import start_watch
from .watch_restarts import WatchRestarts

__all__ = ["BY_ITSELF", "guard", "main"]

CHECK_S = 2.0
MAX_ENDS = 20
"""Maximum consecutive crashes. After so many, which take a quarter of an hour, another restart would not help."""
BY_ITSELF = (0, 2)
"""Exit codes of a watch that is not restarted. 0: the run is over, or the watch was asked to stop. 2: there is no such
run, or another watch has it."""


def guard(watch: WatchRestarts, events: EventWriter, run: RunDir) -> None:
    """Restart the watch until it ends by itself."""
    while not watch.is_over and watch.num_quick_ends < MAX_ENDS:
        if watch.process.poll() is not None and _is_gone(run.path):
            return
        events.attempt = newest(run, default=0)
        watch.check()
        time.sleep(CHECK_S)


def _is_gone(path: Path) -> bool:
    """Return True if the file does not exist; an error of the disk does not prove that."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def main(arguments: Sequence[str]) -> int:
    """Start the watch and supervise it."""
    path, (node_rank, launcher_pid, num_nodes), digests = Path(arguments[0]), map(int, arguments[1:4]), arguments[4]
    run = RunDir(path)
    folder = run.node_dir(node_rank)
    folder.mkdir(parents=True, exist_ok=True)
    events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)

    def start(heartbeat_fd: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
        return start_watch(
            path, node_rank, launcher_pid, num_nodes=num_nodes, digests=digests, options=options,
            heartbeat_fd=heartbeat_fd,
        )  # fmt: skip

    guard(WatchRestarts(run, node_rank, events, start, final=BY_ITSELF), events, run)
    events.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
