"""Whether a run that is resumed has finished: from the order of its records, and from what is on the disk."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from trainer.config.config import Config
from trainer.launcher.resume import FinishedError, prepare

STEPS = Config().train.steps


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.write_manifest({"config": Config().model_dump(mode="json"), "world_size": 1, "cwd": str(tmp_path)})
    run.node_dir(0).mkdir(parents=True)
    (run.checkpoints / f"step-{STEPS:08d}").mkdir(parents=True)
    return run


def _launched(run: RunDir, reason: str) -> None:
    with closing(EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)) as events:
        events.write("run_started", node_rank=0)
        events.write("run_ended", node_rank=0, reason=reason)


def test_a_finished_run_is_not_started_again(run: RunDir) -> None:
    _launched(run, "preempted")
    _launched(run, "finished")
    with pytest.raises(FinishedError):
        prepare(run.path, [], force=False)


def test_a_clock_that_was_set_back_does_not_finish_a_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finished by a clock that was an hour ahead, was continued for more steps, and was preempted."""
    now = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        _launched(run, "finished")
    _launched(run, "preempted")
    assert prepare(run.path, [], force=False).config.train.steps == STEPS


def test_a_launch_that_failed_before_its_start_leaves_more_steps_to_do(run: RunDir) -> None:
    """It wrote into run.json that it wants more steps; then the disk was full, or it was killed."""
    _launched(run, "finished")
    wanted = Config().model_copy(update={"train": Config().train.model_copy(update={"steps": STEPS + 50})})
    run.add_to_manifest({"config": wanted.model_dump(mode="json")})
    for overrides in ([], [f"train.steps={STEPS + 50}"]):
        assert prepare(run.path, overrides, force=False).config.train.steps == STEPS + 50
