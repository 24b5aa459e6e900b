"""Verdicts of `rankscope analyze` in the second in which a run ends: real gloo ranks, one of which ends or hangs.

    python -m benchmarks.durability.same_second --tries 50
    python -m benchmarks.durability.same_second --tries 4 --endings kill,hang_SIGTERM --seed 7 --json same_second.json

Each try launches a tiny DDP script of three ranks under `rankscope run`. Rank 1 is killed, exits with code 0, returns,
raises, enters an all-reduce with another size, or hangs. Once `watch` has reported a hang, the launcher gets SIGINT,
SIGTERM or SIGKILL. The run is judged like by `rankscope analyze`, first at a random moment within a second of the end,
then repeatedly until the verdict is final. Every verdict must be right (kind, rank, cause) or begin with "Still
reading"; the last one must be right; and no later verdict may contradict a right one.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from rankscope.commands.analyze import judge_run
from store import StoreError

__all__ = ["ENDINGS", "Ending", "Try", "attempt"]

NUM_RANKS = 3
CULPRIT = 1
STRIKE_STEP = 12
DEADLINE_S = 120.0
WITHIN_S = 1.0
"""The first verdict is requested at a random moment within this time after the end."""
BETWEEN_S = 0.4
FINAL_S = 90.0
"""Verdicts are requested for this long, or until two have been given after the last process ended."""
STILL_READING = "Still reading"
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100000):
    time.sleep(0.01)
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    if step >= int(sys.argv[2]) and dist.get_rank() == 1:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[1] == "exit":
            os._exit(0)
        if sys.argv[1] == "return":
            break
        if sys.argv[1] == "raise":
            raise ValueError("a bad sample")
        if sys.argv[1] == "size":
            dist.all_reduce(torch.ones(7))
        if sys.argv[1] == "hang":
            time.sleep(10000)
    elif step == int(sys.argv[2]) and sys.argv[1] == "size":
        dist.all_reduce(torch.ones(5))
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """End of a run, and the expected verdict."""

    mode: str
    launcher_signal: int = 0
    kind: str = "rank_lost"
    causes: tuple[str, ...] = ()


ENDINGS: dict[str, Ending] = {
    "kill": Ending(mode="kill", causes=("signal",)),
    "exit": Ending(mode="exit", causes=("exit",)),
    "return": Ending(mode="return", causes=("exit",)),
    "raise": Ending(mode="raise", causes=("exception",)),
    "size": Ending(mode="size", kind="hang", causes=("mismatch_size",)),
    **{
        f"hang_{number.name}": Ending(
            mode="hang", launcher_signal=number, kind="hang", causes=("not_entered", "stopped", "busy")
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    },
}


@dataclass(slots=True)
class Try:
    """One run: each verdict with its time after the end, and the errors."""

    ending: str
    answers: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not self.problems


def attempt(name: str, folder: Path, within_s: float) -> Try:
    """Run the script to its end, and request verdicts from `within_s` after it on."""
    ending, result = ENDINGS[name], Try(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    run = RunDir(folder / "run")
    command = [sys.executable, "-m", "rankscope", "run", "--run-dir", str(run.path)]
    command += ["--nproc-per-node", str(NUM_RANKS), "train.py", ending.mode, str(STRIKE_STEP)]
    with (folder / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await_end(run, launcher, ending)
        time.sleep(within_s)
        _ask(run, ending, result, within_s, launcher)
    except TimeoutError as error:
        result.problems.append(str(error))
    finally:
        _end(run, launcher)
    if not result.is_right:
        result.problems.append((folder / "launcher.log").read_text()[-1500:])
    return result


def _await_end(run: RunDir, launcher: subprocess.Popen[bytes], ending: Ending) -> None:
    """Return when rank 1 ends, or when the launcher of a hanging job gets its signal."""
    if not ending.launcher_signal:
        _wait(lambda: (pid := _pids(run).get(CULPRIT)) and not _is_alive(pid), "end of rank 1")
        return
    _wait(lambda: any(event.get("finding_kind") == "hang" for event in _node_events(run)), "live report of the hang")
    launcher.send_signal(ending.launcher_signal)


def _ask(run: RunDir, ending: Ending, result: Try, since_s: float, launcher: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic() - since_s
    was_right, final = False, 0
    while time.monotonic() - begin < FINAL_S and final < 2:
        over = launcher.poll() is not None and not _watch_is_alive(run)
        when_s = time.monotonic() - begin
        try:
            diagnosis = judge_run(run.path)
        except StoreError as error:
            result.problems.append(f"{when_s:.1f} s: {error}")
            return
        right = any(
            found.kind == ending.kind and found.ranks == (CULPRIT,) and found.cause in ending.causes
            for found in diagnosis.fired[:1]
        )
        reading = diagnosis.verdict.startswith(STILL_READING)
        result.answers.append((round(when_s, 2), ("right: " if right else "") + diagnosis.verdict))
        if not right and not reading:
            result.problems.append(f"{when_s:.1f} s: {diagnosis.verdict}")
        if was_right and not right:
            result.problems.append(f"{when_s:.1f} s: taken back: {diagnosis.verdict}")
        was_right |= right
        final = final + 1 if over else 0
        time.sleep(BETWEEN_S)
    if not was_right:
        result.problems.append("never right")


def _end(run: RunDir, launcher: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of this try."""
    with contextlib.suppress(ProcessLookupError):
        launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(20)
    for pid in [launcher.pid, *_pids(run).values(), *_watch_pids(run)]:
        if _is_alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    launcher.wait()


def _pids(run: RunDir) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, rank, folder in run.rank_dirs():
        events = read_events(folder / "events.jsonl")[0] if (folder / "events.jsonl").exists() else []
        pids = [int(event["pid"]) for event in events if event["kind"] == event_kinds.RANK]
        if pids:
            found[rank] = pids[-1]
    return found


def _node_events(run: RunDir) -> list[dict[str, Any]]:
    path = run.node_dir(0) / "events.jsonl"
    return read_events(path)[0] if path.exists() else []


def _watch_pids(run: RunDir) -> list[int]:
    return [int(event["pid"]) for event in _node_events(run) if event["kind"] == event_kinds.WATCH_STARTED]


def _watch_is_alive(run: RunDir) -> bool:
    return any(_is_alive(pid) for pid in _watch_pids(run))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {DEADLINE_S:.0f} s")
        time.sleep(0.02)


def _print(tries: Sequence[Try], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("ending", "tries", "right", "first answer still reading", "seconds to the right answer, slowest"):
        table.add_column(title)
    for name in dict.fromkeys(one.ending for one in tries):
        chosen = [one for one in tries if one.ending == name]
        reading = sum(one.answers[0][1].startswith(STILL_READING) for one in chosen if one.answers)
        slowest = max(
            (next((when for when, text in one.answers if text.startswith("right")), 0.0) for one in chosen), default=0.0
        )
        table.add_row(name, str(len(chosen)), str(sum(one.is_right for one in chosen)), str(reading), f"{slowest:.1f}")
    console.print(table)
    for one in tries:
        for problem in one.problems:
            console.print(f"{one.ending}: {problem}", markup=False, highlight=False)


def main() -> int:
    """Run the benchmark; return 1 if one try was wrong."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--tries", type=int, default=16)
    parser.add_argument("--endings", default=",".join(ENDINGS), help="comma-separated")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of verdicts")
    options = parser.parse_args()
    names, moments, tries = options.endings.split(","), random.Random(options.seed), []
    console = Console()
    for number in range(options.tries):
        with tempfile.TemporaryDirectory(prefix="same-second-") as folder:
            one = attempt(names[number % len(names)], Path(folder), moments.uniform(0.0, WITHIN_S))
        tries.append(one)
        first = one.answers[0] if one.answers else (0.0, "no answer")
        mark = "right" if one.is_right else "WRONG"
        console.print(
            f"{number + 1}/{options.tries} {one.ending}: {mark}, {first[0]} s: {first[1]}",
            markup=False,
            highlight=False,
        )
    _print(tries, console)
    write_json(
        options.json, [{"ending": one.ending, "answers": one.answers, "problems": one.problems} for one in tries]
    )
    return 0 if all(one.is_right for one in tries) else 1


if __name__ == "__main__":
    sys.exit(main())
