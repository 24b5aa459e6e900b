"""Starts `watch` as a process of its own beside the ranks.

A second watch of a node ends by itself with one line (it cannot have the writer's right), so whoever may be the first
simply starts one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from probes.own_process import own_process

__all__ = ["start_watch"]


def start_watch(run_dir: Path, node_rank: int = 0, launcher_pid: int = 0) -> subprocess.Popen[bytes]:
    """Start a watch process for a run; its log is `logs/watch-node<k>.log` in the run's folder."""
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    command, environment = own_process(
        "trainer.recovery.watch", str(run_dir), "--node-rank", str(node_rank), "--launcher-pid", str(launcher_pid)
    )
    with (logs / f"watch-node{node_rank}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer; watch records how it ends
            env=environment,
        )
