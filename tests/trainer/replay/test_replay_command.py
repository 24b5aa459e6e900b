"""`rankscope replay`: a step of a run that is over, computed once more, in one process or in as many as it had."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from probes.guard.decisions import RunStopped
from probes.tape.rundir import RunDir
from rankscope.cli import app
from tests.depth import usually
from tests.local_forks import forking_subprocess
from tests.processes import run_ranks
from tests.rankscope.test_json_schema import checked
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.config.config import Config

LAYOUTS = {"ddp": {"dp_replicate": 2, "dp_shard": 1}, "fsdp": {"dp_shard": 2}, "cp": {"cp": 2, "dp_shard": 1}}


def _runs() -> dict[str, tuple[Config, list[str]]]:
    """By folder: a run whose gradient a fault made NaN, a healthy sharded one, and one that the guard gave up."""
    saves: dict[str, Any] = {"checkpoint": {"interval": 4, "asynchronous": False}}  # or one is ready too late
    absurd: dict[str, Any] = {"optim": {"lr": 1e30, "clip_norm": 0.0}}
    runs = {
        "nan": (with_steps(small(parallel=LAYOUTS["ddp"], **saves), 14), ["nan_grad@step=11,rank=1"]),
        "sharded": (with_steps(small(parallel=LAYOUTS["fsdp"], **saves), 8), []),
        "pieces": (with_steps(small(parallel=LAYOUTS["cp"], model={"num_experts": 4}, **saves), 8), []),
        "absurd": (with_steps(small(parallel=LAYOUTS["ddp"], **saves, **absurd), 5), []),
    }
    return usually(runs, later=["pieces"])


def _train(rank: int, world_size: int, folder: Path) -> None:
    for name, (config, faults) in _runs().items():
        with contextlib.suppress(RunStopped):
            run_loop(config, folder / name, rank=rank, world_size=world_size, faults=faults)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    run_ranks(_train, world_size=2, args=(folder,), deadline_s=120)
    for name, (config, _) in _runs().items():
        RunDir(folder / name).write_manifest(
            {"run_id": name, "config": config.model_dump(mode="json"), "world_size": 2}
        )
    return folder


def replayed(path: Path, step: int, *more: str) -> Any:
    done = CliRunner().invoke(app, ["replay", str(path), "--step", str(step), "--device", "cpu", *more])
    assert done.exit_code == 0, done.output
    if "json" not in more:
        return done.stdout
    checked("replay", told := json.loads(done.stdout))
    return told


def files_of(path: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file() and "telemetry" not in p.name}


def test_a_fault_of_a_device_does_not_come_back(runs: Path) -> None:
    before = files_of(runs / "nan")
    found = replayed(runs / "nan", 11, "--format", "json")
    assert (found["step_kind"], found["is_reproduced"], found["replay_verdict"]) == ("non_finite", False, "transient")
    assert (found["state_step"], found["steps_recomputed"], found["batch_index"]) == (8, 2, 10)
    assert math.isfinite(found["loss"])
    assert found["num_processes"] == 1
    assert found["max_loss_deviation_ratio"] < 1e-5
    assert not found["data_differs"]
    text = replayed(runs / "nan", 11)
    assert "Verdict Step 11 had NaN or Inf. A replay was clean, so suspect" in " ".join(text.split())
    assert files_of(runs / "nan") == before, "nothing is written into the run"


def test_a_healthy_step_gives_its_loss_again_and_the_retaken_one_is_chosen(runs: Path) -> None:
    found = replayed(runs / "nan", 14, "--format", "json")
    assert found["step_kind"] == "healthy"
    assert found["loss"] == pytest.approx(found["loss_recorded"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(found["grad_norm_recorded"], rel=1e-4)
    assert found["batch_index"] == 13, "no batch was skipped"


def test_absurd_weights_come_back_on_their_state_only(runs: Path) -> None:
    text = " ".join(replayed(runs / "absurd", 2).split())
    assert "but not on the state of step 0, so suspect the weights of step 1." in text
    assert "forward" in text
    assert "all ranks" in text
    found = replayed(runs / "absurd", 2, "--format", "json")
    assert (found["is_reproduced"], found["is_reproduced_when_restored"], found["replay_verdict"]) == (
        True,
        False,
        "weights",
    )
    assert found["origin_module"]
    assert found["origin_phase"] == "forward"
    assert found["origin_inputs"]
    assert found["origin_ranks"] == [0, 1]
    assert len(found["samples"]) == 8


@pytest.mark.parametrize("run", [name for name in ("sharded", "pieces") if name in _runs()])
def test_what_is_shared_takes_as_many_processes_as_the_run_had_ranks(
    runs: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.replay.session.subprocess", forking_subprocess())
    found = replayed(runs / run, 6, "--format", "json")
    assert found["num_processes"] == 2
    assert (found["step_kind"], found["state_step"], found["steps_recomputed"]) == ("healthy", 4, 1)
    assert found["loss"] == found["loss_recorded"], "the same computation, to the last bit"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{runs}/nan", "--step", "900"], "nan: it has steps 1 to 14."),
        (["{runs}/nowhere", "--step", "1"], "nowhere"),
        (["{runs}/nan", "--step", "3", "--device", "tpu"], "choose auto, cpu or cuda"),
        (["{runs}/nan", "--step", "3", "--format", "xml"], "choose text or json"),
        (["{runs}/foreign", "--step", "3"], "no configuration of this trainer"),
    ],
)
def test_mistakes_are_one_line(runs: Path, arguments: list[str], words: str) -> None:
    (runs / "foreign").mkdir(exist_ok=True)
    RunDir(runs / "foreign").write_manifest({"run_id": "foreign"})
    done = CliRunner().invoke(app, ["replay", *(argument.format(runs=runs) for argument in arguments)])
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
