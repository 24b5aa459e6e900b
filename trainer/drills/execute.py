"""Runs one scenario of a drill as a user would: `rankscope train` in a separate process.

    result = execute(scenario, base, folder, limit_s=180, server=PreforkServer(), say=print)
    result.run, result.wall_s, result.problem

With a server parent the command is forked from a process that has imported torch; else it is a new interpreter. The
process is asked to end at the limit, and whatever of the run is left after that is killed by its id.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from probes.attach.launch.own_process import own_process
from probes.tape.rundir import RunDir, RunError
from trainer.drills.scenario import Scenario
from trainer.launcher.processes.prefork import PreforkServer, StartedCommand
from trainer.launcher.processes.zygote import ZygoteError
from watch.processes import kill, processes_of

__all__ = ["Base", "Executed", "execute"]

_END_S = 40.0
"""After SIGTERM: the ranks may finish their step and save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Configuration shared by all runs of a drill."""

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
    scenario: Scenario,
    base: Base,
    folder: Path,
    *,
    limit_s: float,
    server: PreforkServer | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Executed:
    """Train the scenario to its end in `folder`; `on_line` gets each line that the run prints, from another thread.

    On KeyboardInterrupt the run is ended first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    process = _start(_arguments(scenario, base, folder), server)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_follow, args=(process.stdout, lines, on_line), daemon=True)
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
        problem = next((line.strip() for line in reversed(lines) if line.strip()), "the run did not start")
    return Executed(run=run, wall_s=time.monotonic() - start, exit_code=process.returncode, problem=problem)


def _arguments(scenario: Scenario, base: Base, folder: Path) -> list[str]:
    changes = (*base.overrides, *scenario.settings, f"run.dir={folder}", "run.name=drill")
    arguments = ["train", *([str(base.config)] if base.config else [])]
    arguments += [part for change in changes for part in ("--set", change)]
    arguments += [part for fault in scenario.faults for part in ("--fault", fault.text)]
    return [*arguments, "--nproc-per-node", str(base.num_ranks)]


def _start(arguments: list[str], server: PreforkServer | None) -> StartedCommand | subprocess.Popen[str]:
    if server is not None:
        with contextlib.suppress(ZygoteError):
            return server.start(arguments)
    command, environment = own_process("rankscope", *arguments)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the drill, which ends the run
        env=environment,
    )


def _follow(stream: IO[str], lines: list[str], on_line: Callable[[str], None]) -> None:
    for line in stream:
        lines.append(line)
        if line.strip():
            on_line(line.strip())


def _run_in(folder: Path) -> RunDir | None:
    try:
        return RunDir(RunDir.open(folder / "latest").path.resolve())
    except RunError:
        return None


def _end(process: StartedCommand | subprocess.Popen[str], folder: Path) -> None:
    """Ask the launcher to end, then end it and the ranks that it leaves behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    process.kill()
    process.wait()
    run = _run_in(folder)
    for pid in processes_of(run.path) if run else ():
        kill(pid, signal.SIGKILL)
