"""Start `watch` as a separate process next to the ranks.

    process = start_watch(run.path, node_rank, launcher_pid)       # a child of the launcher
    process = start_watch(..., heartbeat_fd=write_end)             # writes a byte into this pipe once a second
    start_detached_watch(run.path, node_rank)      # outlives the rank that starts it; `watch_guard` restarts it

A second watch of a node exits by itself with one log line, because it cannot get the writer lock. So every process that
may be the first starts one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .own_process import own_process

__all__ = ["digest_address", "start_detached_watch", "start_watch"]

# Forks twice, so that `watch` is no child of the training script, which may wait for all of its children.
_DETACH = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"


def start_watch(
    run_dir: Path,
    node_rank: int = 0,
    launcher_pid: int = 0,
    *,
    num_nodes: int = 1,
    digests: str = "",
    options: Sequence[str] = (),
    heartbeat_fd: int = -1,
) -> subprocess.Popen[bytes]:
    """Start a watch process for a run; its log is `logs/watch-node<k>.log` in the run's folder.

    `digests`: HOST:PORT of the store through which the watches of several nodes communicate. `options`: further options
    of `rankscope watch`.
    """
    beats = ["--heartbeat-fd", str(heartbeat_fd)] if heartbeat_fd >= 0 else []
    fds = (heartbeat_fd,) if beats else ()
    arguments = [str(run_dir), "--node-rank", str(node_rank), "--launcher-pid", str(launcher_pid), *options, *beats]
    if digests and num_nodes > 1:
        arguments += ["--num-nodes", str(num_nodes), "--digests", digests]
    command, environment = own_process("watch.node_process", *arguments)
    return _start(run_dir, node_rank, command, environment, fds)


def start_detached_watch(
    run_dir: Path, node_rank: int = 0, launcher_pid: int = 0, *, num_nodes: int = 1, digests: str = ""
) -> None:
    """Start `watch` detached from this process, supervised by `watch_guard`."""
    arguments = (str(run_dir), str(node_rank), str(launcher_pid), str(num_nodes), digests)
    command, environment = own_process("probes.attach.launch.watch_guard", *arguments)
    _start(run_dir, node_rank, [sys.executable, "-S", "-E", "-c", _DETACH, *command], environment).wait(60)


def digest_address() -> tuple[int, str]:
    """Return (nodes, HOST:PORT) of torchrun's store, in which the watches of several nodes exchange digests; else (1,
    "")."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    if not host or not port.isdecimal() or not nodes.isdecimal() or int(nodes) < 2:
        return 1, ""
    return int(nodes), f"{host}:{port}"


def _start(
    run_dir: Path, node_rank: int, command: list[str], environment: dict[str, str], fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / f"watch-node{node_rank}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal must not reach watch, which records how the run ends
            env=environment,
            pass_fds=fds,
        )
