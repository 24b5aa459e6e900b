"""Signals in bad moments: a rank is struck in an exact phase, and what it leaves is whole.

A real worker process each time. It strikes itself from within the phase, so the moment is exact: in the middle of a
rollback, in the thread that saves, while a restart loads, while it saves because it was told to stop. After each the
next attempt finishes, and the account holds: every batch but the bad one is in the final state once, with the bits of a
run that nobody struck.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes.tape.events import read_events
from probes.tape.files.shared_memory import remove_shared
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.rundir import RunDir
from tests.processes import start_function
from tests.trainer.training_runs import small, with_steps
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.manifest import read_manifest, verify_files

_STOPS = ("preempted", "interrupted")
STEPS = 20
BAD_BATCH = 13
FAULT = f"failing_batch@batch={BAD_BATCH}"  # bad whenever it is trained, so also when the blow came before it
STRIKES: dict[str, tuple[signal.Signals, ...]] = {
    "in a rollback": (signal.SIGTERM, signal.SIGINT, signal.SIGKILL),
    "after a rollback's decision": (signal.SIGTERM, signal.SIGKILL),
    "in a save": (signal.SIGTERM, signal.SIGKILL),
    "before a rename": (signal.SIGINT, signal.SIGKILL),
    "in a restart": (signal.SIGTERM, signal.SIGKILL),
    "twice": (signal.SIGTERM,),
    "again a while later": (signal.SIGTERM, signal.SIGINT),
}


def _worker(folder: Path, attempt: int, phase: str, number: int) -> None:
    """One attempt of a rank, struck in a phase ("": in none)."""
    from trainer.rank import worker

    with (folder / "rank.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(
        RANKSCOPE_RUN_DIR=str(folder), RANKSCOPE_ATTEMPT=str(attempt), RANKSCOPE_CONFIG=_config().model_dump_json()
    )
    os.environ["RANKSCOPE_FAIL_LOUD"] = "1"
    if phase:
        _strike_in(phase, number)
    sys.argv = ["trainer.rank.worker", "--fault", FAULT]
    worker.run_and_leave()


def _config() -> Any:
    return with_steps(small(checkpoint={"interval": 4, "memory_interval": 4}), STEPS)


def _strike_in(phase: str, number: int) -> None:
    from trainer.checkpoint.disk_tier.saving import Save
    from trainer.checkpoint.memory_tier.copies import MemoryCopies
    from trainer.checkpoint.memory_tier.host_copy import HostCopy
    from trainer.guard import state_copies
    from trainer.rank import worker

    def kill() -> None:
        os.kill(os.getpid(), number)

    def again_later() -> None:
        worker.IMPATIENCE_S = 0.0  # a second, after which a SIGINT that comes again means: at once
        kill()
        kill()

    def once(owner: Any, name: str, blow: Callable[[], None], *, step: int = 0) -> None:
        """From the step on: a save is left out where the one before is still being written."""
        inner = getattr(owner, name)

        def struck(*arguments: Any, **named: Any) -> Any:
            if not done and getattr(arguments[0], "step", 0) >= step:
                done.append(phase)
                blow()
            return inner(*arguments, **named)

        done: list[str] = []
        setattr(owner, name, struck)

    places: dict[str, Callable[[], None]] = {
        "in a rollback": lambda: once(HostCopy, "restore", kill),
        "after a rollback's decision": lambda: once(MemoryCopies, "restore", kill),
        "in a save": lambda: once(Save, "_write", kill, step=12),
        "before a rename": lambda: once(Save, "_finish", kill, step=12),
        "in a restart": lambda: once(state_copies.StateCopies, "_load_newest", kill),
        "twice": lambda: once(Save, "_write", lambda: (kill(), kill())[0], step=12),
        "again a while later": lambda: once(MemoryCopies, "restore", again_later),
    }
    places[phase]()


def _run(folder: Path, attempt: int, phase: str = "", number: int = 0) -> int:
    process = start_function(_worker, folder, attempt, phase, number)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"attempt {attempt} did not end\n{(folder / 'rank.log').read_text()}") from None


def _taken(folder: Path) -> dict[int, tuple[int, float]]:
    """{step: (batch, loss)} of the steps that lead to the final state: the last time that each was taken."""
    found: dict[int, tuple[int, float]] = {}
    for attempt in range(3):
        for path in segment_paths(RunDir(folder).rank_dir(attempt, 0), "steps"):
            for record in read_segment(path).records:
                if record["committed"] == 1:
                    found.pop(int(record["step"]), None)  # so that the newest is the last one
                    found[int(record["step"])] = (int(record["batch_index"]), float(record["loss"]))
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    RunDir(folder).write_manifest({"config": _config().model_dump(mode="json")})
    return folder


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Any:
    yield
    remove_shared(tmp_path / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, float]]:
    folder = _made(tmp_path_factory.mktemp("struck") / "whole")
    assert _run(folder, 0) == 0, (folder / "rank.log").read_text()
    taken = _taken(folder)
    assert [batch for batch, _ in taken.values()] == [batch for batch in range(STEPS + 1) if batch != BAD_BATCH]
    return taken


@pytest.mark.parametrize(("phase", "number"), [(phase, one) for phase, numbers in STRIKES.items() for one in numbers])
def test_struck_in_a_bad_moment(
    phase: str, number: signal.Signals, whole: dict[int, tuple[int, float]], tmp_path: Path
) -> None:
    folder, attempt = _made(tmp_path / "run"), 0
    if phase == "in a restart":
        assert _run(folder, attempt, "in a save", signal.SIGKILL) == -signal.SIGKILL
        attempt = 1
    code = _run(folder, attempt, phase, number)
    expected = -number if number == signal.SIGKILL else 143
    if (phase, number) == ("again a while later", signal.SIGINT):
        expected = 128 + number
    assert code == expected, (folder / "rank.log").read_text()
    if expected == 143:  # SIGTERM again, from the scheduler or the launcher, must not interrupt the save
        newest = checkpoint_steps(folder / "checkpoints")[-1]
        manifest = read_manifest(folder / "checkpoints" / f"step-{newest:08d}")
        verify_files(folder / "checkpoints" / f"step-{newest:08d}", manifest, manifest["files"])
        stops = [e for e in read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")[0] if e["kind"] in _STOPS]
        assert newest == stops[-1]["checkpoint_step"], "told to stop, it leaves with the state that it has"
    assert _run(folder, attempt + 1) == 0, (folder / "rank.log").read_text()
    assert _taken(folder) == whole
