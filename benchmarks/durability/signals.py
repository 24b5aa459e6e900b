"""Seconds from a signal to the verdict and to the exit, and remaining processes, for `run`, `train` and `demo` on a
terminal.

    python -m benchmarks.durability.signals                                   # all 63 trials, 40 minutes
    python -m benchmarks.durability.signals --tries 3 --json signals.json     # 189 trials, for the 99th percentile
    python -m benchmarks.durability.signals --commands run --states free,held --signals SIGINT,SIGTERM

Each trial starts the command on a pseudo-terminal, waits for its state and sends the signal as a terminal, Slurm or
Kubernetes does (`hangup` closes the terminal; SIGKILL goes to every process 30 s after `SIGTERM_then_SIGKILL`). A hang
must be reported within 3 s of the signal; the command must end within 20 s and leave no process; and `rankscope
analyze` must give the same verdict afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from probes.tape.rundir import RunDir, RunError
from rankscope.commands.analyze import judge_run
from store import StoreError

__all__ = ["SIGNALS", "STATES", "Result", "trial"]

DEADLINE_S = 600.0
VERDICT_S, END_S, KILL_AFTER_S, LEFT_AFTER_S = 3.0, 20.0, 30.0, 10.0
STATES = {
    "run": ("healthy", "free", "held", "handler"),
    "train": ("healthy", "free", "held"),
    "demo": ("healthy", "serving"),
}
HANGS = ("free", "held", "handler")
SIGNALS = ("SIGINT", "SIGTERM", "SIGTERM_then_SIGKILL", "SIGHUP", "hangup", "SIGINT_twice", "SIGINT_after_SIGTERM")
_MARK = "RANKSCOPE_TRIAL"
_VERDICT = re.compile(rb"Verdict|Interrupted|Preempted")
SCRIPT = """
import ctypes, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
if sys.argv[1] == "handler":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: print("later", flush=True))
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1000000):
    time.sleep(0.02)
    model(torch.randn(8, 64)).pow(2).mean().backward()
    if step == 20 and dist.get_rank() == 1:
        mutex = ctypes.create_string_buffer(64)
        while sys.argv[1] in ("free", "held"):  # the second time it never returns
            (ctypes.PyDLL if sys.argv[1] == "held" else ctypes.CDLL)(None).pthread_mutex_lock(mutex)
        while sys.argv[1] == "handler":
            time.sleep(1)
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(slots=True, kw_only=True)
class Result:
    """One trial. Times are seconds after the signal."""

    command: str
    state: str
    signal: str
    verdict_s: float | None = None
    end_s: float | None = None
    code: int | None = None
    left: int = 0
    problem: str = ""


class _Terminal:
    """The terminal's side of a command, read in a thread."""

    def __init__(self, command: Sequence[str], folder: Path, mark: str) -> None:
        self._master, slave = pty.openpty()
        self.text = b""
        self._closing = threading.Event()
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, _MARK: mark}, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def hang_up(self) -> None:
        """Close the terminal, as when a connection is lost."""
        self._closing.set()
        self._reader.join()

    def _read(self) -> None:
        # Closed by the reading thread, which would keep it open while it waits in `read`.
        with contextlib.suppress(OSError):  # the command has ended
            while not self._closing.is_set():
                if select.select([self._master], [], [], 0.05)[0]:
                    self.text += os.read(self._master, 1 << 16)
        os.close(self._master)


def trial(command: str, state: str, name: str, folder: Path) -> Result:
    """Start the command, wait for the state, send the signal."""
    result = Result(command=command, state=state, signal=name)
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    mark = uuid.uuid4().hex
    terminal = _Terminal(_command(command, state), folder, mark)
    try:
        _await(lambda: _is_in(state, folder, terminal), terminal, state)
        _send(name, terminal, mark, result)
        if state in HANGS and (problem := _judged(folder)):
            result.problem = result.problem or problem
    except TimeoutError as error:
        result.problem = str(error)
    finally:
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        terminal.process.wait()
        terminal.hang_up()
        (folder / "terminal.txt").write_bytes(terminal.text)
    return result


def _command(command: str, state: str) -> list[str]:
    words = [sys.executable, "-m", "rankscope", command]
    if command == "run":
        return [*words, "--run-dir", "runs/latest", "--nproc-per-node", "2", "script.py", state]
    if command == "demo":
        return [*words, "--dashboard"]
    fault = {"free": ["--fault", "hang@step=20,rank=1"], "held": ["--fault", "gil@step=20,rank=1"]}
    settings = ["--set", "recovery.enabled=false", "--set", "train.steps=100000"]
    return [
        *words,
        "gpt-demo",
        "--nproc-per-node",
        "2",
        "--set",
        "parallel.dp_shard=2",
        *settings,
        *fault.get(state, []),
    ]


def _is_in(state: str, folder: Path, terminal: _Terminal) -> bool:
    if state == "serving":
        return b"Ctrl-C ends it" in terminal.text
    try:
        run = RunDir.open(folder / "runs" / "latest")
    except (RunError, OSError):
        return False
    if state in HANGS:
        events = read_events(run.node_dir(0) / "events.jsonl")[0]
        return any(e["kind"] == event_kinds.FINDING and e.get("finding_kind") == "hang" for e in events)
    with contextlib.suppress(OSError, TapeError):
        return any(len(read_segment(path, 0).records) > 10 for path in segment_paths(run.rank_dir(0, 0), "steps"))
    return False


def _await(condition: Callable[[], bool], terminal: _Terminal, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline or terminal.process.poll() is not None:
            raise TimeoutError(f"never {what}: {terminal.text[-300:].decode(errors='replace')}")
        time.sleep(0.1)


def _send(name: str, terminal: _Terminal, mark: str, result: Result) -> None:
    """Send the named signals, and measure until the command's end."""
    process, before, began = terminal.process, len(terminal.text), time.monotonic()
    if name == "hangup":
        terminal.hang_up()
    else:
        first = getattr(signal, name.partition("_")[0] if "after" not in name else "SIGTERM")
        # A terminal's signal goes to all of its foreground processes; Slurm's and Kubernetes' to one.
        (os.killpg if first in (signal.SIGINT, signal.SIGHUP) else os.kill)(process.pid, first)
    second_s = 0.6 if name in ("SIGINT_twice", "SIGINT_after_SIGTERM") else None
    while process.poll() is None:
        elapsed_s = time.monotonic() - began
        if result.verdict_s is None and _VERDICT.search(terminal.text[before:]):
            result.verdict_s = elapsed_s
        if second_s is not None and elapsed_s > second_s:
            os.killpg(process.pid, signal.SIGINT)
            second_s = None
        if elapsed_s > KILL_AFTER_S:
            break
        time.sleep(0.01)
    result.end_s = time.monotonic() - began
    if result.verdict_s is None and _VERDICT.search(terminal.text[before:]):
        result.verdict_s = result.end_s
    result.code = process.poll()
    deadline = time.monotonic() + LEFT_AFTER_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    result.left = len(left)
    text = terminal.text[before:]
    if result.end_s > END_S:
        result.problem = f"did not end within {END_S:.0f} s"
    elif left:
        result.problem = f"{len(left)} processes left"
    elif b"Over: " in text or (b"Traceback" in text and result.command != "run"):  # the script itself may print one
        result.problem = "reported as over, or a traceback"
    elif result.state in HANGS and name != "hangup" and (result.verdict_s is None or result.verdict_s > VERDICT_S):
        result.problem = f"no verdict within {VERDICT_S:.0f} s"


def _judged(folder: Path) -> str:
    """Error of the later verdict; empty if it is the hang of rank 1."""
    try:
        diagnosis = judge_run(RunDir.open(folder / "runs" / "latest").path)
    except (RunError, StoreError) as error:
        return f"cannot be judged: {error}"
    found = [(finding.kind, finding.ranks) for finding in diagnosis.fired]
    return "" if found and found[0] in (("hang", (1,)), ("hang", (0, 1))) else f"judged as {found[:2]}"


def _marked(mark: str) -> list[int]:
    """Processes started by the command, recognised by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes() and b") Z " not in (path / "stat").read_bytes():
                found.append(int(path.name))
    return found


def summary(results: Sequence[Result]) -> str:
    """The table of all trials in Markdown: 99th percentile of the time to the verdict, longest time to the end, most
    processes left.
    """
    names = list(dict.fromkeys(result.signal for result in results))
    lines = [f"| command, state | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for command, state in dict.fromkeys((result.command, result.state) for result in results):
        row = [result for result in results if (result.command, result.state) == (command, state)]
        cells = [_cell([result for result in row if result.signal == name]) for name in names]
        lines.append(f"| {command}, {state} | {' | '.join(cells)} |")
    hung = [result.verdict_s for result in results if result.state in HANGS and result.verdict_s is not None]
    ends = [result.end_s for result in results if result.end_s is not None]
    return "\n".join((
        *lines, "",
        "Each cell: seconds to the verdict (99th percentile), to the end (longest) / processes left (most).",
        f"{len(results)} trials, {sum(bool(result.problem) for result in results)} with a problem; verdict of a hang: "
        f"p99 {_text(_p99(hung))} s of {len(hung)}; "
        f"end: p99 {_text(_p99(ends))} s, at most {_text(max(ends, default=None))} s; "
        f"left: {sum(result.left for result in results)}",
    ))  # fmt: skip


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "-"
    verdicts = [result.verdict_s for result in results if result.verdict_s is not None]
    ends = [result.end_s for result in results if result.end_s is not None]
    text = f"{_text(_p99(verdicts))}, {_text(max(ends, default=None))} / {max(result.left for result in results)}"
    return f"{text}: {problem}" if (problem := next((one.problem for one in results if one.problem), "")) else text


def _p99(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--commands", default="run,train,demo")
    parser.add_argument("--states", default="", help="only these states of each command (all)")
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--tries", type=int, default=1, metavar="N", help="of each trial")
    options = parser.parse_args(arguments)
    console, results = Console(), []
    folder = Path(tempfile.mkdtemp(prefix="signals-"))
    for command in options.commands.split(","):
        for state in STATES[command]:
            if options.states and state not in options.states.split(","):
                continue
            for name, turn in itertools.product(options.signals.split(","), range(options.tries)):
                result = trial(command, state, name, folder / f"{command}-{state}-{name}-{turn}")
                results.append(result)
                console.print(f"{command} {state} {name}: {_row(result)[3:]}", highlight=False)
                write_json(options.json, [asdict(one) for one in results])
    if problems := [result for result in results if result.problem]:
        table = Table("command", "state", "signal", "verdict s", "end s", "code", "left", "problem")
        for result in problems:
            table.add_row(*_row(result))
        console.print(table)
    print(summary(results))
    console.print(f"terminals: {folder}")
    return int(any(result.problem for result in results))


def _row(result: Result) -> list[str]:
    times = (_text(result.verdict_s), _text(result.end_s))
    return [result.command, result.state, result.signal, *times, str(result.code), str(result.left), result.problem]


if __name__ == "__main__":
    sys.exit(main())
