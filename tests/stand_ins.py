"""Processes that stand for the ranks of a run: each has a file open, which is moved into the run's folder.

ranks = stand_ins(tmp_path, 4)
take_in(run, ranks)
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from probes.tape.rundir import RunDir


def stand_ins(folder: Path, number: int) -> list[subprocess.Popen[bytes]]:
    """Start them. The caller ends them."""
    started = []
    for i in range(number):
        with (folder / f"held-{i}").open("w+") as held:
            started.append(subprocess.Popen(["sleep", "300"], stdin=held))
    return started


def take_in(run: RunDir, processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Move their open files into the run's folder, by which they are recognised as its processes."""
    for process in processes:
        held = Path(f"/proc/{process.pid}/fd/0").readlink()
        if held.exists():  # a process that has ended has none
            held.rename(run.path / held.name)
