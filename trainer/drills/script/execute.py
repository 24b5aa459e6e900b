"""Run a user's script once, with one fault or none injected, and end it when enough was recorded.

done = execute(Plan(words=("train.py",), num_ranks=4), [fault], folder)
done.run, done.problem
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.attach.injected_fault import VARIABLE, InjectedFault
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from probes.tape.rundir import RunDir
from trainer.drills.script.faults import SCRIPT_FAULTS
from watch.processes import kill, processes_of

__all__ = ["Done", "Plan", "execute"]

POLL_S = 0.25
END_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The script with its arguments (or `-m MODULE ...`), and the limits at which each of its runs is ended."""

    words: tuple[str, ...]
    num_ranks: int
    step: int = 30
    """The step at which, or from which, the fault acts."""
    steps_after: int = 120
    """Number of steps after which a run is ended if nothing else ends it."""
    limit_s: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run. `is_stopped`: the drill ended it. `num_steps`: steps of rank 0, in all attempts."""

    run: RunDir
    is_stopped: bool
    num_steps: int
    wall_s: float
    problem: str = ""


def execute(plan: Plan, faults: Sequence[InjectedFault], folder: Path) -> Done:
    """Launch the script under `rankscope run`, and wait for its end. Several faults take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder / "run")
    command = [sys.executable, "-m", "rankscope", "run", "--run-dir", str(run.path)]
    command += ["--nproc-per-node", str(plan.num_ranks), *plan.words]
    environment = dict(os.environ) | ({VARIABLE: ";".join(fault.text for fault in faults)} if faults else {})
    begin = time.monotonic()
    with (folder / "output.log").open("w") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    is_stopped, problem, not_before = False, "", begin
    last_step = plan.step + max(plan.steps_after, *(SCRIPT_FAULTS[fault.name].least_steps for fault in faults), 0)
    least_s = max((SCRIPT_FAULTS[fault.name].least_s for fault in faults), default=0.0)
    hangs = any(SCRIPT_FAULTS[fault.name].hangs for fault in faults)
    kinds = {kind for fault in faults for kind in SCRIPT_FAULTS[fault.name].kinds}
    try:
        while launcher.poll() is None:
            time.sleep(POLL_S)
            if time.monotonic() - begin > plan.limit_s:
                problem = f"did not end within {plan.limit_s:.0f} s"
            enough = _reported(run, kinds) if hangs else _steps(run) >= last_step and time.monotonic() >= not_before
            if _steps(run) < plan.step:
                not_before = time.monotonic() + least_s
            if enough or problem:
                is_stopped = True
                break
    finally:
        _end(launcher, run)
    if not any(run.rank_dirs()):
        lines = (folder / "output.log").read_text(errors="replace").strip().splitlines()
        problem = problem or (lines[-1] if lines else "nothing was recorded")
    return Done(run=run, is_stopped=is_stopped, num_steps=_steps(run), wall_s=time.monotonic() - begin, problem=problem)


def _reported(run: RunDir, kinds: Collection[str]) -> bool:
    """Return True if one of these kinds was reported live, or a rank has ended."""
    events = [event for _, folder in run.node_dirs() for event in read_events(folder / "events.jsonl")[0]]
    return any(
        (event["kind"] == event_kinds.FINDING and event.get("finding_kind") in kinds)
        or event["kind"] == event_kinds.RANK_EXIT
        for event in events
    )


def _steps(run: RunDir) -> int:
    """Number of steps of rank 0 so far."""
    count = 0
    for _, _, folder in run.rank_dirs(0):
        with contextlib.suppress(TapeError, OSError):
            count += sum(len(read_segment(path).records) for path in segment_paths(folder, "steps"))
    return count


def _end(launcher: subprocess.Popen[bytes], run: RunDir) -> None:
    """End the launcher like a scheduler does, then any remaining processes."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(END_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + END_S  # the watch exits by itself
    while (remaining := processes_of(run.path)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in remaining:
        kill(pid, signal.SIGKILL)
