"""Run one scenario of a drill as a user would: `rankscope train` in a separate process.

    result = execute(scenario, base, folder, limit_s=180, server=PreforkServer(), on_line=print)
    result.run, result.wall_s, result.problem

With a `server` the command is forked from a process that has already imported torch; without one, a new interpreter is
started. At the time limit the launcher gets SIGTERM, then SIGKILL together with the remaining processes of the run.
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
"""Seconds that the ranks have after SIGTERM to finish their step and save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Configuration shared by all runs of a drill."""

    config: Path | None
    overrides: tuple[str, ...]
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A finished run. `run` is None if it did not start; `problem` says why, or that the time limit was exceeded."""

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
    """Train the scenario to its end in `folder`; another thread calls `on_line` with each printed line.

    KeyboardInterrupt ends the run before it is raised.
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
        start_new_session=True,  # Ctrl-C reaches only the drill, which then ends the run
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
    """Terminate the launcher; after `_END_S` kill it and its remaining ranks."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    process.kill()
    process.wait()
    run = _run_in(folder)
    for pid in processes_of(run.path) if run else ():
        kill(pid, signal.SIGKILL)
