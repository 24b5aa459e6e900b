"""Runs one scenario of a drill as a user would: `rankscope train` in a process of its own.

    result = execute(scenario, base, folder, limit_s=180, say=print)
    result.run, result.wall_s, result.problem

The process is told to end at the limit, and whatever of the run is left after that is killed by its id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from probes.rundir import RunDir, RunError
from trainer.drills.scenario import Scenario
from trainer.recovery.processes import kill

__all__ = ["Base", "Executed", "execute"]

_PROJECT = Path(__file__).resolve().parents[2]
_END_S = 40.0
"""After SIGTERM: the ranks may finish their step and save."""
_RUN_DIR = "RANKSCOPE_RUN_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What all runs of a drill have in common."""

    config: Path | None
    overrides: tuple[str, ...]
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A run that is over. `run` is None if it never began; `problem` says so, or that it did not end in time."""

    run: RunDir | None
    wall_s: float
    exit_code: int | None
    problem: str = ""


def execute(
    scenario: Scenario, base: Base, folder: Path, *, limit_s: float, say: Callable[[str], None] = lambda line: None
) -> Executed:
    """Train the scenario to its end in `folder`; `say` gets each line that the run prints, from another thread.

    On KeyboardInterrupt the run is ended first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    process = subprocess.Popen(
        _command(scenario, base, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the drill, which ends the run
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))},
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_follow, args=(process.stdout, lines, say), daemon=True)
    reader.start()
    problem = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        problem = f"did not end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            _end(process, folder)
    reader.join(timeout=5)
    (folder / "train.log").write_text("".join(lines))
    run = _run_in(folder)
    if run is None and not problem:
        problem = next((line.strip() for line in reversed(lines) if line.strip()), "the run never began")
    return Executed(run=run, wall_s=time.monotonic() - start, exit_code=process.returncode, problem=problem)


def _command(scenario: Scenario, base: Base, folder: Path) -> list[str]:
    changes = (*base.overrides, *scenario.settings, f"run.dir={folder}", "run.name=drill")
    command = [sys.executable, "-P", "-m", "rankscope", "train", *([str(base.config)] if base.config else [])]
    command += [part for change in changes for part in ("--set", change)]
    command += [part for fault in scenario.faults for part in ("--fault", fault.text)]
    return [*command, "--nproc-per-node", str(base.num_ranks)]


def _follow(stream: IO[str], lines: list[str], say: Callable[[str], None]) -> None:
    for line in stream:
        lines.append(line)
        if line.strip():
            say(line.strip())


def _run_in(folder: Path) -> RunDir | None:
    try:
        return RunDir(RunDir.open(folder / "latest").path.resolve())
    except RunError:
        return None


def _end(process: subprocess.Popen[str], folder: Path) -> None:
    """Ask the launcher to end, then end it and the ranks that it leaves behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    process.kill()
    process.wait()
    run = _run_in(folder)
    for pid in _processes_of(run) if run else ():
        kill(pid, signal.SIGKILL)


def _processes_of(run: RunDir) -> list[int]:
    """Processes that were started for the run: it is named in their environment."""
    wanted = f"{_RUN_DIR}={run.path}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
