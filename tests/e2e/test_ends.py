"""How runs end when a person or a scheduler ends them, and what a user's mistakes print."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from probes.tape.format.schema import SCHEMA_VERSION
from probes.tape.rundir import RunDir
from probes.tape.segment_index import INDEX_NAME
from tests.depth import later
from tests.e2e.launched import SOURCE, TINY, analysis_of, rankscope, start, without_load
from tests.forked import run_python
from tests.waiting import wait_for


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=later("e2e/test_preemption.py"))])
def test_an_interrupted_run_saves_and_closes(tmp_path: Path, number: signal.Signals) -> None:
    run = start(
        tmp_path, "ddp", settings=["train.steps=100000", "checkpoint.interval=0"], fresh=number == signal.SIGINT
    )
    wait_for(lambda: run.pids().keys() >= {0, 1, 2, 3} and _steps(run.run) > 5, "steps", run)
    run.process.send_signal(number)
    run.finish(exit_code=128 + number)
    assert any(event["state"] == "complete" for event in run.events("checkpoint", 0))
    reason = "preempted" if number == signal.SIGTERM else "interrupted"
    assert run.events("run_ended")[-1]["reason"] == reason
    (told,) = run.events(reason, rank=0)
    assert told["checkpoint_step"] == _steps(run.run) >= 5
    assert all(run.events("rank_closed", rank) for rank in range(4))
    assert run.own_findings() == []
    ((_, node),) = run.run.node_dirs()
    index = [json.loads(line) for line in (node / INDEX_NAME).read_text().splitlines()]
    covered = {entry["path"]: entry["extent"] for entry in index}
    events = node / "events.jsonl"
    size = events.stat().st_size
    assert covered[events.relative_to(run.run.path).as_posix()] == size, "the last event has a checksum too"


@later("trainer/rank/test_worker.py::test_torchrun_survives_a_killed_rank")
def test_a_run_under_plain_torchrun_is_recorded_and_watched(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SOURCE * 4)
    settings = (*TINY, f"run.dir={tmp_path / 'runs'}", f"data.path=['{text}']", "train.steps=12")
    arguments = [part for setting in settings for part in ("--set", setting)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python([*torchrun, "-m", "rankscope.worker", *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunDir.open(tmp_path / "runs" / "latest")
    assert len(list(run.rank_dirs())) == 2
    wait_for(lambda: run.store().exists(), "the store")
    printed = rankscope("analyze", str(run.path)).stdout
    fired = [finding for finding in analysis_of(run.path)["findings"] if finding["status"] == "fired"]
    assert without_load(fired) == []
    assert fired or "no problems found" in printed.lower()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("missing", "no run at"),
        ("empty", "holds no run"),
        ("file", "not a run's folder"),
        ("newer", "update rankscope"),
    ],
)
def test_unreadable_runs_are_one_clear_line(tmp_path: Path, make: str, words: str) -> None:
    path = tmp_path / "run"
    if make == "empty":
        path.mkdir()
    if make == "file":
        path.write_text("no run")
    if make == "newer":
        RunDir(path).path.mkdir()
        RunDir(path).write_manifest({"schema_version": SCHEMA_VERSION + 1})
    if make == "file":  # any text is read as a log, and one that names no cause gets no clean bill
        done = rankscope("analyze", str(path))
        assert done.returncode == 0
        assert "a cause or a training step" in done.stdout
        assert "No problems found" not in done.stdout
    for command in ("analyze", "rebuild", "watch") if make != "file" else ("rebuild", "watch"):
        done = rankscope(command, str(path))
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such.toml"], "no-such.toml"),
        (["broken.toml"], "broken.toml"),
        (["--set", "train.stepz=3"], "train.stepz"),
        (["--set", "parallel.tp=3"], "tp"),
        (["--set", "parallel.dp_shard=3", "--nproc-per-node", "4"], "4"),
        (["--fault", "nan_grad@rank=one"], "nan_grad"),
        (["--set", "run.dir=/proc/nothing"], "/proc/nothing"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "broken.toml").write_text("[train\nsteps = ")
    done = rankscope("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*"))


def _steps(run: RunDir) -> int:
    """Steps on the tape of rank 0; none while the file is there and its header is not."""
    from probes.tape.format.reader import TapeError, read_segment, segment_paths

    try:
        return sum(len(read_segment(path).records) for path in segment_paths(run.rank_dir(0, 0), "steps"))
    except TapeError:
        return 0
