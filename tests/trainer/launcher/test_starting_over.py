"""`checkpoint.resume=false`: it holds for the launch that asks, whose restarts and successors resume."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from tests.e2e.conftest import nothing_is_left_running  # noqa: F401  # a fixture
from tests.e2e.launched import LaunchedRun, resume, train
from tests.trainer.checkpoint.remote.test_remote_copies import content, make_checkpoint
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.config.config import Config
from trainer.launcher import start
from trainer.launcher.remote_checkpoints import RemoteCheckpoints
from trainer.launcher.resume import ResumeError
from trainer.launcher.start import Options, launch_run


def _launched(monkeypatch: pytest.MonkeyPatch, run: RunDir | None, tmp_path: Path, *overrides: str) -> Config:
    """The configuration that a launch gives to its ranks; none are started."""
    given: list[Config] = []

    def supervise(run: RunDir, config: Config, **_: Any) -> int:
        given.append(config)
        return 0

    monkeypatch.setattr(start, "supervise", supervise)
    settings = [] if run is not None else [f"run.dir={tmp_path}", "train.device=cpu"]
    options = Options(resume=str(run.path) if run is not None else None, overrides=[*settings, *overrides], nproc=1)
    launch_run(options, version="0", console=Console(file=io.StringIO()))
    return given[0]


def test_only_the_launch_that_asks_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "checkpoint.resume=false"
    assert _launched(monkeypatch, None, tmp_path, asked).checkpoint.resume, "a new run has nothing to start over"
    run = RunDir.open(tmp_path / "latest")
    run.rank_dir(0, 0).mkdir(parents=True)
    assert run.manifest()["start_over_at"] is None
    assert _launched(monkeypatch, run, tmp_path, asked).checkpoint.resume, "of its ranks' restarts"
    assert (run.manifest()["start_over_at"], run.manifest()["config"]["checkpoint"]["resume"]) == (1, True)
    _launched(monkeypatch, run, tmp_path)
    assert run.manifest()["start_over_at"] is None
    former = run.manifest()
    former["config"]["checkpoint"]["resume"] = False  # as former versions left it
    run.write_manifest(former)
    _launched(monkeypatch, run, tmp_path)
    assert (run.manifest()["start_over_at"], run.manifest()["config"]["checkpoint"]["resume"]) == (None, True)


def test_another_optimizer_begins_without_the_former_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, None, tmp_path)
    run = RunDir.open(tmp_path / "latest")
    before = run.manifest()
    with pytest.raises(ResumeError, match=r"optim.name = 'muon' \(was 'adamw'\): cannot continue"):
        _launched(monkeypatch, run, tmp_path, "optim.name=muon")
    assert run.manifest() == before
    assert _launched(monkeypatch, run, tmp_path, "optim.name=muon", "checkpoint.resume=false").optim.name == "muon"


def test_what_is_at_the_address_from_before_is_put_aside_there(tmp_path: Path) -> None:
    run, _ = RunDir.adopt(tmp_path / "run")
    run.begin_manifest({})
    run.node_dir(0).mkdir(parents=True)
    config = Config.model_validate({"checkpoint": {"remote": f"file://{tmp_path}/remote"}}).checkpoint
    remote = tmp_path / "remote" / "run"
    with closing(EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)) as events:

        def launch(start_over_at: int | None) -> str:
            run.write_manifest(run.manifest() | {"start_over_at": start_over_at})
            console = Console(file=io.StringIO())
            checkpoints = RemoteCheckpoints(run, config, events, is_used=True)
            assert checkpoints.begin(console) is None
            assert not checkpoints.end()
            return console.file.getvalue()  # type: ignore[attr-defined]

        folder = make_checkpoint(run.checkpoints, 50, {"a": content(1, 5000)})
        launch(None)
        sent = {path.name for path in (remote / "objects").iterdir()}
        folder.rename(tmp_path / "aside")  # as the ranks do it
        assert "earlier checkpoints are in" in launch(1)
        assert "fetched" not in launch(None)
    assert checkpoint_steps(run.checkpoints) == []
    (aside,) = remote.glob("before-*")
    assert (aside / "checkpoints" / "step-00000050.json").is_file()
    assert {path.name for path in (aside / "objects").iterdir()} == sent


def _loaded(run: LaunchedRun) -> dict[int, int]:
    """{attempt: step that it began at}."""
    found = {}
    for attempt, rank, folder in run.run.rank_dirs():
        for event in read_events(folder / "events.jsonl")[0]:
            if rank == 0 and event.get("state") == "loaded":
                found[attempt] = event["step"]
    return found


def test_a_crash_after_a_save_and_the_next_launch_resume(tmp_path: Path) -> None:
    first = train(tmp_path, "two", settings=["train.steps=30"])
    again = resume(first, settings=["checkpoint.resume=false"], faults=["kill@step=18,rank=1"]).finish()
    assert "starting over: earlier checkpoints move to" in again.output
    last = resume(first, settings=["train.steps=33"]).finish()
    loaded = _loaded(last)
    assert 1 not in loaded
    assert loaded[2] in (10, 15)
    assert loaded[3] == 30
    checkpoints = last.run.checkpoints
    before = checkpoint_steps(checkpoints / "before-attempt-1")
    assert before in ([10, 20, 30], [10, 30]), "one is left out where the one before is still being written"
    assert checkpoint_steps(checkpoints)[-1] == 33
