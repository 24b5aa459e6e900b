"""Starts `watch` as a process of its own beside the ranks.

A second watch of a node ends by itself with one line (it cannot have the writer's right), so whoever may be the first
simply starts one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["start_watch"]

_PROJECT = Path(__file__).resolve().parents[2]


def start_watch(run_dir: Path, node_rank: int = 0, launcher_pid: int = 0) -> subprocess.Popen[bytes]:
    """Start a watch process for a run; its log is `logs/watch-node<k>.log` in the run's folder."""
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))
    with (logs / f"watch-node{node_rank}.log").open("ab") as log:
        return subprocess.Popen(
            # -P: a folder `trainer` of the user's own, where he stands, is not ours
            [
                sys.executable,
                "-P",
                "-m",
                "trainer.recovery.watch",
                str(run_dir),
                "--node-rank",
                str(node_rank),
                "--launcher-pid",
                str(launcher_pid),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer; watch records how it ends
            env={**os.environ, "PYTHONPATH": path},
        )
