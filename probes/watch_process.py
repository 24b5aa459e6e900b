"""Starts `watch` as a process of its own beside the ranks.

    process = start_watch(run.path, node_rank, launcher_pid)       # a child, for whoever looks after it
    leave_watch(run.path, node_rank)                               # nobody's child, for a rank that may die

A second watch of a node ends by itself with one line (it cannot have the writer's right), so whoever may be the first
simply starts one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .own_process import own_process

__all__ = ["leave_watch", "start_watch"]

# Forks once more and goes: the script that is being trained may wait for its own children, and must not find this one.
_LEAVE = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"


def start_watch(run_dir: Path, node_rank: int = 0, launcher_pid: int = 0) -> subprocess.Popen[bytes]:
    """Start a watch process for a run; its log is `logs/watch-node<k>.log` in the run's folder."""
    return _start(run_dir, node_rank, launcher_pid, [])


def leave_watch(run_dir: Path, node_rank: int = 0, launcher_pid: int = 0) -> None:
    """The same without a child: the process belongs to the system, whatever becomes of this one."""
    _start(run_dir, node_rank, launcher_pid, [sys.executable, "-S", "-E", "-c", _LEAVE]).wait(60)


def _start(run_dir: Path, node_rank: int, launcher_pid: int, through: list[str]) -> subprocess.Popen[bytes]:
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    command, environment = own_process(
        "trainer.recovery.watch", str(run_dir), "--node-rank", str(node_rank), "--launcher-pid", str(launcher_pid)
    )
    with (logs / f"watch-node{node_rank}.log").open("ab") as log:
        return subprocess.Popen(
            [*through, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer; watch records how it ends
            env=environment,
        )
