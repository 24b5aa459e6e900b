"""Real runs for the end-to-end tests: `rankscope train` and `analyze` as a user starts them, in a folder of their own.

run = train(tmp_path, "ddp", faults=["nan_grad@step=8,rank=1"])
run.findings("non_finite")[0]["ranks"] == [1]
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from rankscope import cli
from tests.forked import ForkedPython, run_python
from tests.waiting import wait_for

LAYOUTS = {
    "ddp": ("parallel.dp_replicate=4", "parallel.dp_shard=1"),
    "fsdp": ("parallel.dp_shard=4",),
    "two": ("parallel.dp_replicate=2", "parallel.dp_shard=1"),
    "elastic": ("parallel.dp_shard=-1",),
    "hsdp": ("parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "tp": ("parallel.dp_shard=1", "parallel.tp=4"),
    "fsdp_tp": ("parallel.dp_shard=2", "parallel.tp=2"),
}
TINY = (
    "run.name=e2e",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "data.seq_len=32",
    "train.global_batch_size=8",
    "train.device=cpu",
    "optim.warmup_steps=5",
    "checkpoint.interval=10",
    "checkpoint.memory_interval=5",
)
SOURCE = "import this\n" * 20 + Path(__file__).read_text()
OF_SPEED = frozenset({
    "bubble", "checkpoint_age", "checkpoint_cost", "data_bound", "exposed_communication", "host_pressure",
    "low_bandwidth", "slow_startup", "stage_imbalance", "straggler", "throughput",
})  # fmt: skip
"""Kinds of findings that say how fast something was, on the machine of the test too."""
DEADLINE_S = 150.0
_READERS = frozenset({"analyze", "collect", "compare", "export", "report", "share", "sql"})
STARTED: list[LaunchedRun] = []
"""Runs of the test that is running; what is left of them is killed at its end (conftest)."""


@dataclass
class LaunchedRun:
    """One `rankscope train` process and the run that it makes."""

    process: subprocess.Popen[str]
    runs_dir: Path
    output: str = ""
    _analysis: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        """The run's folder; waits until it is there."""
        wait_for(lambda: (self.runs_dir / "latest").exists(), "the run's folder", self)
        return RunDir.open(self.runs_dir / "latest")

    def finish(self, *, exit_code: int | None = 0) -> LaunchedRun:
        """Wait for the end and check the exit code; the output is in `output`."""
        try:
            self.output, _ = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"train did not end within {DEADLINE_S} s\n{self.logs()}") from None
        if exit_code is not None:
            assert self.process.returncode == exit_code, f"{self.output}\n{self.logs()}"
        return self

    def has_ended(self) -> bool:
        """Return True if the launcher has ended."""
        return self.process.poll() is not None

    def analyze(self) -> dict[str, Any]:
        """Output of `rankscope analyze --format json`."""
        if not self._analysis:
            self._analysis = analysis_of(self.runs_dir / "latest")
        return self._analysis

    def findings(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Fired findings of the post-mortem, of one kind or all."""
        fired = [finding for finding in self.analyze()["findings"] if finding["status"] == "fired"]
        return [finding for finding in fired if kind is None or finding["kind"] == kind]

    def own_findings(self) -> list[dict[str, Any]]:
        """Fired findings of the post-mortem, without those of the machine's load."""
        return without_load(self.findings())

    def events(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Events of a kind: the node's, or one rank's over all attempts."""
        run = self.run
        folders = [d for _, d in run.node_dirs()] if rank is None else [d for _, r, d in run.rank_dirs() if r == rank]
        found = [event for folder in folders for event in read_events(folder / "events.jsonl")[0]]
        return [event for event in found if event["kind"] == kind]

    def is_saved(self) -> bool:
        """Return True if a checkpoint on disk is complete."""
        return any(event["state"] == "complete" and event["tier"] == "disk" for event in self.events("checkpoint", 0))

    def pids(self) -> dict[int, int]:
        """{rank: pid} of the newest attempt."""
        newest: dict[int, int] = {}
        for _, rank, folder in self.run.rank_dirs():
            for event in read_events(folder / "events.jsonl")[0]:
                if event["kind"] == "rank":
                    newest[rank] = event["pid"]
        return newest

    def kill_all(self) -> None:
        """SIGKILL to every process of the run: watch, ranks, launcher."""
        # The launcher goes last, and does nothing meanwhile: its death ends the ranks, and a watch would record it.
        self.process.send_signal(signal.SIGSTOP)
        try:
            if (self.runs_dir / "latest").exists():
                pids = [event["pid"] for event in self.events("watch_started")] + list(self.pids().values())
                # All stand still before the first dies, or a rank records that the connection to another is closed.
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in pids:
                        kill(pid, number)
        finally:
            self.process.kill()
            self.process.wait(60)

    def logs(self) -> str:
        """The end of every log file, for a failed assertion."""
        files = sorted((self.runs_dir / "latest" / "logs").rglob("*.log"))
        return "\n".join(f"--- {file.name} {file.parent.name}\n{file.read_text()[-3000:]}" for file in files)


def without_load(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """But for those of speed: what runs beside a test takes its cores and disks, and that is rightly reported."""
    return [finding for finding in findings if finding["kind"] not in OF_SPEED]


def unhurried(num_ranks: int, *, steps: int = 800, seconds: float = 0.1) -> list[str]:
    """Faults with which each step waits for its data: a run that is only looked at leaves the cores to who looks.

    A fault ends with its attempt, so each lasts for a few steps.
    """
    return [
        f"slow_data@step={first},until={first + 39},rank={rank},seconds={seconds}"
        for first in range(1, steps, 40)
        for rank in range(num_ranks)
    ]


def start(
    tmp_path: Path,
    layout: str,
    *,
    faults: Sequence[str] = (),
    settings: Sequence[str] = (),
    options: Sequence[str] = (),
    fresh: bool = False,
) -> LaunchedRun:
    """Start `rankscope train` on a tiny model over four ranks; `fresh`: as an interpreter of its own."""
    text = tmp_path / "text.txt"
    text.write_text(SOURCE * 4)
    runs = tmp_path / "runs"
    every = (*TINY, f"run.dir={runs}", f"data.path=['{text}']", *LAYOUTS[layout], *settings)
    return _launch(runs, [*options, *_options(every, faults)], fresh=fresh)


def resume(
    run: LaunchedRun, *options: str, settings: Sequence[str] = (), faults: Sequence[str] = (), address: str = ""
) -> LaunchedRun:
    """Start `rankscope train --resume` on the run of an earlier launch, or on its address."""
    path = address or str(run.runs_dir / "latest")
    return _launch(run.runs_dir, ["--resume", path, *options, *_options(settings, faults)])


def _options(settings: Sequence[str], faults: Sequence[str]) -> list[str]:
    found = [part for setting in settings for part in ("--set", setting)]
    return found + [part for fault in faults for part in ("--fault", fault)]


def _launch(runs: Path, arguments: Sequence[str], *, fresh: bool = False) -> LaunchedRun:
    """Forked from a process that has imported torch (`tests.forked`); `fresh`: an interpreter of its own."""
    arguments = ["-m", "rankscope", "train", *arguments]
    options: dict[str, Any] = {
        "cwd": runs.parent, "env": {**os.environ, "RANKSCOPE_FAIL_LOUD": "1"}, "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace",
    }  # fmt: skip
    process: subprocess.Popen[Any] = (
        subprocess.Popen([sys.executable, *arguments], **options)
        if fresh
        else ForkedPython(arguments, forks_python=True, **options)
    )
    run = LaunchedRun(process, runs)
    STARTED.append(run)
    return run


def train(
    tmp_path: Path,
    layout: str,
    *,
    faults: Sequence[str] = (),
    settings: Sequence[str] = (),
    options: Sequence[str] = (),
) -> LaunchedRun:
    """Run `rankscope train` to its clean end."""
    return start(tmp_path, layout, faults=faults, settings=settings, options=options).finish()


def analysis_of(run: Path) -> dict[str, Any]:
    """What `rankscope analyze --format json` prints of a run."""
    done = rankscope("analyze", str(run), "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rankscope(*arguments: str, timeout_s: float = 100.0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run any `rankscope` command; one that only reads runs in this process, which has its imports already.

    The others are forks of one that has.
    """
    if arguments[0] in _READERS:
        return _in_this_process(arguments, cwd or Path.cwd())
    return run_python(["-m", "rankscope", *arguments], cwd=cwd, timeout_s=timeout_s)


def _in_this_process(arguments: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Call the entry of the command line, with its output and errors kept apart."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    code: Any = 0
    argv = sys.argv
    sys.argv = ["rankscope", *arguments]
    try:
        with contextlib.chdir(cwd), redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    printed = []
    for stream in streams:
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, int(code), *printed)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one process; one that is gone is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
