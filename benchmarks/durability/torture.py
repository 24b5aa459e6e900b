"""Faults in a bad environment: another wall clock, a store kept open, a stopped watch, disks that fail.

    python -m benchmarks.durability.torture  # the whole table, some twenty minutes; needs a C compiler
    python -m benchmarks.durability.torture --only clock --only eio_load

A run of two ranks saves every ten steps. After twenty steps the environment goes bad and stays bad; that alone must not
cause a kill or a condemned checkpoint. Some seconds later rank 1 is killed (SIGKILL) or stopped (SIGSTOP). Then:

1. exactly rank 1 must be named, and in a hang exactly rank 1 killed;
2. training must continue from a checkpoint, either at once or, if the disk prevents it, after a one-line error, exit
   code 75 and `--resume` once the disk works again;
3. no checkpoint may be condemned, and no other rank killed.

`torture_shim.c` fakes the clock and file errors through LD_PRELOAD; the full disk is a small image
(`benchmarks.cost.loop_disk`, needs root). Exit code 1 if a cell of the table failed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cost.loop_disk import LoopDisk, own_mounts
from benchmarks.harness import argument_parser
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment
from probes.tape.rundir import RunDir, RunError
from trainer.exit_codes import EXIT_STORAGE
from trainer.launcher.processes.prefork import PreforkServer, StartedCommand

READ, WRITE, MAKE = 1, 2, 4
HOUR_NS = 3600 * 10**9
VICTIM = 1
SETTINGS = (
    "run.name=torture", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4",
    "data.seq_len=32", "train.global_batch_size=4", "train.device=cpu", "train.steps=100000000",
    "checkpoint.interval=10", "checkpoint.memory_survives=false", "parallel.dp_replicate=2", "parallel.dp_shard=1",
    "recovery.hang_floor_s=8", "recovery.max_failures_per_device=0",
)  # fmt: skip
STEPS_BEFORE = 20
TWENTY = "twenty steps, a checkpoint and a watch"
QUIET_S = 6.0
LIMIT_S = 120.0
"""Maximum seconds from the fault to the next step, including a launch; generous, since the machine may be busy."""


class Failed(Exception):
    """An expected event did not happen; the message is one line."""


@dataclass(slots=True)
class Stage:
    """One run in its environment."""

    folder: Path
    control: Path
    server: PreforkServer | None
    disk: LoopDisk | None = None
    process: StartedCommand | None = None
    reader: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> Path:
        """Folder of the run."""
        return (self.disk.path if self.disk else self.folder) / "runs"

    @property
    def run(self) -> RunDir:
        """The run."""
        return RunDir.open(self.runs / "latest")

    def set(self, *, offset_ns: int = 0, error: int = 0, operations: int = 0, part: str = "") -> None:
        """Change the shim's behaviour."""
        with self.control.open("r+b") as file:
            file.write(struct.pack("=qii240s", offset_ns, error, operations, part.encode()))

    def launch(self, *arguments: str) -> None:
        """Start `rankscope train`."""
        self.process = self.server.start(["train", *arguments], cwd=self.folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind from the node and all ranks."""
        folders = [path for _, path in self.run.node_dirs()] + [path for _, _, path in self.run.rank_dirs()]
        return [e for path in folders for e in read_events(path / "events.jsonl")[0] if e["kind"] == kind]

    def output(self) -> str:
        """Output of the ended launcher."""
        assert self.process is not None
        return self.process.communicate(20)[0].strip()

    def attempt(self) -> int:
        """The newest attempt that has a rank."""
        with contextlib.suppress(OSError, RunError):
            return max((attempt for attempt, _, _ in self.run.rank_dirs()), default=-1)
        return -1

    def steps(self, attempt: int) -> list[int]:
        """Numbers of the steps that rank 0 has begun in an attempt."""
        with contextlib.suppress(OSError, TapeError, RunError):
            return [
                int(step)
                for path in sorted(self.run.rank_dir(attempt, 0).glob("steps.*.tape"))
                for step in read_segment(path).records["step"]
            ]
        return []

    def pid(self, rank: int) -> int:
        """Process of a rank of the newest attempt."""
        events = read_events(self.run.rank_dir(self.attempt(), rank) / "events.jsonl")[0]
        return int(next(event["pid"] for event in events if event["kind"] == "rank"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A kind of bad environment."""

    apply: Callable[[Stage], None]
    settings: tuple[str, ...] = ()
    needs_disk: bool = False
    may_end: bool = False
    """True if the launcher may end with exit code 75."""


def _clock(offset_ns: int) -> Environment:
    return Environment(apply=lambda stage: stage.set(offset_ns=offset_ns))


def _error(number: int, operations: int, part: str, *, may_end: bool = True) -> Environment:
    def apply(stage: Stage) -> None:
        stage.set(error=number, operations=operations, part=part or f"{stage.runs.resolve()}/")

    return Environment(apply=apply, may_end=may_end)


def _keep_open(stage: Stage) -> None:
    program = (
        "import duckdb, sys, time\n"
        "while True:\n"
        "    try:\n        held = duckdb.connect(sys.argv[1], read_only=True); break\n"
        "    except duckdb.Error: time.sleep(0.01)\n"
        "print(held, flush=True); time.sleep(3600)"
    )
    stage.reader = subprocess.Popen([sys.executable, "-c", program, str(stage.run.store())], stdout=subprocess.PIPE)
    assert stage.reader.stdout is not None
    stage.reader.stdout.readline()


def _stop_watch(stage: Stage) -> None:
    os.kill(stage.events("watch_started")[-1]["pid"], signal.SIGSTOP)


def _fill(stage: Stage) -> None:
    assert stage.disk is not None
    with (stage.disk.path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


ENVIRONMENTS = {
    "none": Environment(apply=lambda stage: None),
    "clock + 1 h": _clock(HOUR_NS),
    "clock - 1 h": _clock(-HOUR_NS),
    "reader_open": Environment(apply=_keep_open),
    "watch_stopped": Environment(apply=_stop_watch),
    "hook_kills_watch": Environment(
        apply=lambda stage: None, settings=("alerts.command=sh {built}/hook.sh",)
    ),
    "disk_full": Environment(apply=_fill, needs_disk=True, may_end=True),
    "disk_read_only": _error(errno.EROFS, WRITE | MAKE, ""),
    "eio_load": _error(errno.EIO, READ, "/checkpoints/step-"),
    "eio_save": _error(errno.EIO, WRITE | MAKE, "/checkpoints/", may_end=False),
    "eio_claim": _error(errno.EIO, WRITE | MAKE, "/attempts/"),
}  # fmt: skip


@dataclass(slots=True)
class Cell:
    """One cell of the table."""

    seconds: float = 0.0
    how: str = ""
    problems: list[str] = field(default_factory=list)


def torture(stage: Stage, environment: Environment, fault: signal.Signals) -> Cell:
    """Run one cell. Raises Failed."""
    cell = Cell()
    extra = [text.replace("{built}", str(stage.control.parent)) for text in environment.settings]
    settings = (*SETTINGS, *extra, f"run.dir={stage.runs}")
    stage.launch(*(part for text in settings for part in ("--set", text)))
    _wait(stage, lambda: len(stage.steps(0)) > STEPS_BEFORE and _is_saved(stage) and _is_watched(stage), TWENTY)
    environment.apply(stage)
    quiet_until = time.monotonic() + QUIET_S
    _wait(stage, lambda: time.monotonic() > quiet_until, "a time without disturbance", goes_on=True)
    begin = time.monotonic()
    os.kill(stage.pid(VICTIM), fault)
    if environment.needs_disk:  # the ranks train without recording, which only shows once there is space again
        _wait(stage, lambda: stage.attempt() > 0 or _has_ended(stage), "next attempt")
        relieve(stage)
    if not _continues(stage, may_end=environment.may_end):
        cell.how = "exit 75, then --resume"
        relieve(stage)
        _check_end(stage)
        stage.launch("--resume", str(stage.runs / "latest"))
        _continues(stage, may_end=False)
    else:
        cell.how = "restarted"
    cell.seconds = time.monotonic() - begin
    relieve(stage)
    assert stage.process is not None
    stage.process.terminate()
    _wait(stage, lambda: _has_ended(stage), "the end of the run")
    cell.problems += _problems(stage, fault)
    return cell


def _check_end(stage: Stage) -> None:
    """Raise Failed unless the ended launcher printed a one-line reason and no traceback."""
    assert stage.process is not None
    text = stage.output()
    if stage.process.returncode != EXIT_STORAGE or "Traceback" in text:
        raise Failed(f"exit code {stage.process.returncode}: {' | '.join(text.splitlines()[-4:])}")


def _problems(stage: Stage, fault: signal.Signals) -> list[str]:
    """Wrong actions according to the records."""
    found = []
    killed = {event["killed_rank"] for event in stage.events("culprit_killed")}
    if killed - {VICTIM}:
        found.append(f"killed ranks {sorted(killed)}")
    if fault is signal.SIGKILL and killed:
        found.append("a rank was killed as a hang's culprit, but there was no hang")
    condemned = [event["reason"] for event in stage.events("checkpoint") if event["state"] == "condemned"]
    found += [f"checkpoint condemned: {reason}" for reason in condemned]
    first = stage.steps(stage.attempt())[:1]
    if first and first[0] <= 1:
        found.append("training began at step 1 again")
    kind = "rank_lost" if fault is signal.SIGKILL else "hang"
    # Findings of later attempts may be due to the disk.
    fired = [e for e in stage.events("finding") if e["status"] == "fired" and e["attempt"] == 0]
    wrong = {tuple(e["finding_ranks"]) for e in fired if e["finding_kind"] in ("hang", "rank_lost")} - {(VICTIM,), ()}
    if wrong:
        found.append(f"blamed ranks {sorted(wrong)}")
    process = stage.server.start(["analyze", str(stage.run.path)])
    report = process.communicate(LIMIT_S)[0]
    if f"rank {VICTIM}" not in report.lower():
        found.append(f"{kind} of rank {VICTIM} is not in the report")
    return found


def _has_ended(stage: Stage) -> bool:
    return stage.process is not None and stage.process.poll() is not None


def _continues(stage: Stage, *, may_end: bool) -> bool:
    """Wait for steps of an attempt after the first; False if the launcher ended instead."""
    ended = False

    def done() -> bool:
        nonlocal ended
        ended = _has_ended(stage)
        return ended or (stage.attempt() > 0 and len(stage.steps(stage.attempt())) > 3)

    _wait(stage, done, "steps of the next attempt")
    if ended and not may_end:
        raise Failed(f"the launcher ended: {' | '.join(stage.output().splitlines()[-3:])}")
    return not ended


def _is_saved(stage: Stage) -> bool:
    return any(event["state"] == "good" and event["tier"] == "disk" for event in stage.events("checkpoint"))


def _is_watched(stage: Stage) -> bool:
    return bool(stage.events("watch_started"))  # a busy machine starts it after the first steps


def _wait(stage: Stage, done: Callable[[], bool], what: str, *, goes_on: bool = False) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError, RunError):
            if done():
                return
        if goes_on and (stage.attempt() > 0 or _has_ended(stage)):
            raise Failed("the environment alone ended the ranks")
        if what == TWENTY and _has_ended(stage):
            raise Failed(f"the run did not begin: {' | '.join(stage.output().splitlines()[-3:])}")
        if time.monotonic() > deadline:
            raise Failed(f"no {what} within {LIMIT_S:.0f} s")
        time.sleep(0.1)


def relieve(stage: Stage) -> None:
    """End the bad environment."""
    stage.set()
    if stage.disk is not None:
        (stage.disk.path / "ballast").unlink(missing_ok=True)
    if stage.reader is not None:
        stage.reader.kill()
        stage.reader.wait()
        stage.reader = None


def _end(stage: Stage) -> None:
    """Kill the run's remaining processes."""
    relieve(stage)
    if stage.process is not None:
        stage.process.kill()
    for process in Path("/proc").glob("[0-9]*"):  # all of them were started in this folder
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == stage.folder:
                os.kill(int(process.name), signal.SIGKILL)


def main() -> None:
    """Print the table; exit code 1 if a cell failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", action="append", help="environments whose name begins with this")
    options = parser.parse_args()
    names = [name for name in ENVIRONMENTS if not options.only or name.startswith(tuple(options.only))]
    table = Table("environment", "fault", "then", "seconds", "result", title="Torture", title_justify="left")
    failed = 0
    with tempfile.TemporaryDirectory() as built:
        library, control = Path(built) / "shim.so", Path(built) / "control"
        source = Path(__file__).with_name("torture_shim.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        control.write_bytes(bytes(256))
        (Path(built) / "hook.sh").write_text("kill -9 $PPID\n")  # the process that runs the hook: watch
        os.environ |= {"LD_PRELOAD": str(library), "RS_TORTURE": str(control)}
        own_mounts()
        server = PreforkServer()
        for variable in ("LD_PRELOAD", "RS_TORTURE"):
            del os.environ[variable]
        for name in names:
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                cell = _cell(ENVIRONMENTS[name], fault, control, server)
                failed += bool(cell.problems)
                result = "; ".join(cell.problems) or "right"
                table.add_row(name, fault.name, cell.how, f"{cell.seconds:.0f}", result)
                print(name, fault.name, cell.how, f"{cell.seconds:.0f} s:", result, flush=True)
        server.close()
    Console(width=160).print(table)
    print(f"{failed} of {2 * len(names)} cells failed; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    sys.exit(failed > 0)


def _cell(environment: Environment, fault: signal.Signals, control: Path, server: PreforkServer) -> Cell:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = os.path.realpath(name)
        disk = stack.enter_context(LoopDisk(Path(folder), size_bytes=200 << 20)) if environment.needs_disk else None
        stage = Stage(folder=Path(folder), control=control, server=server, disk=disk)
        try:
            return torture(stage, environment, fault)
        except Failed as problem:
            return Cell(problems=[str(problem)])
        finally:
            _end(stage)


if __name__ == "__main__":
    main()
