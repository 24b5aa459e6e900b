"""`rankscope train --resume`: after everything was killed, on another mesh, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from probes.guard.ledger import LEDGER_NAME, Ledger
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.e2e.launched import kill, rankscope, resume, start, train
from tests.object_store import Fault, s3_server
from tests.waiting import wait_for
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.config.config import Config
from trainer.guard.ledger_file import save_ledger


@later("from its address: the test before; on another mesh: trainer/checkpoint/disk_tier/test_reshard.py")
def test_a_run_that_lost_everything_goes_on_with_another_mesh_and_more_steps(tmp_path: Path) -> None:
    run = start(tmp_path, "fsdp", settings=["train.steps=100000"])
    wait_for(run.is_saved, "a checkpoint", run)
    kill(run.pids()[0], signal.SIGSTOP)  # before the launcher: without it a rank that runs may end
    run.process.kill()
    run.process.wait()
    (watch,) = run.events("watch_started")
    kill(watch["pid"])

    refused = resume(run)
    refused.finish(exit_code=2)
    assert "is still alive: rank 0 (pid" in refused.output
    assert len(refused.output.strip().splitlines()) == 1

    survivor = run.pids()[0]
    steps = checkpoint_steps(run.run.checkpoints)[-1] + 15
    again = resume(run, "--force", settings=[f"train.steps={steps}", "parallel.dp_shard=1", "parallel.tp=2"])
    wait_for(lambda: again.events("attempt_started")[-1]["attempt"] == 1, "the next attempt", again)
    again.finish()
    assert "resumed: run" in again.output
    assert [event["pid"] for event in again.events("stale_killed")].count(survivor) == 1
    loaded = [event["step"] for event in again.events("checkpoint", 0) if event["state"] == "loaded"]
    assert loaded == [steps - 15]
    assert checkpoint_steps(again.run.checkpoints)[-1] == steps
    assert again.run.manifest()["mesh"]["tp"] == 2


def test_a_machine_that_lost_the_run_goes_on_from_its_address(tmp_path: Path) -> None:
    with s3_server() as store:
        store.faults.append(Fault(action="500", method="PUT", part="/objects/", times=3))
        address = f"s3://{store.bucket}/runs"
        first = train(tmp_path, "two", settings=["train.steps=12", f"checkpoint.remote={address}"])
        name = first.run.run_id
        assert f"runs/{name}/checkpoints/step-00000012.json" in store.names(), first.output
        shutil.rmtree(first.runs_dir / name)

        again = resume(first, settings=["train.steps=15"], address=f"{address}/{name}").finish()
        assert "checkpoint of step 12 fetched from" in again.output
        assert checkpoint_steps(first.runs_dir / name / "checkpoints")[-1] == 15
        assert f"runs/{name}/checkpoints/step-00000015.json" in store.names()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "model.dim=64"], "model.dim = 64 (was 128): would change the model"),
        (["--set", "train.global_batch_size=32"], "would change the numbering of the batches"),
        (["--set", "train.stepz=3"], "train.stepz"),
        (["--force", "--nproc-per-node", "3", "--set", "parallel.dp_shard=2"], "world size is 3"),
        (["other.toml"], "takes the run's own configuration"),
        ([], "stopped by the guard: 6 failures in a row. To try again, use --force."),
    ],
)
def test_a_refused_resume_is_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    manifest = {"config": Config().model_dump(mode="json"), "world_size": 1}
    run = RunDir.create(tmp_path, name="old", manifest=manifest)
    ledger, _ = Ledger.load(run.checkpoints / LEDGER_NAME)
    ledger.stopped = "6 failures in a row"
    save_ledger(ledger)
    done = rankscope("train", "--resume", str(run.path), *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert json.loads((run.path / "run.json").read_text())["world_size"] == 1
    assert Ledger.load(run.checkpoints / LEDGER_NAME)[0].stopped, "a launch that did not happen forgives nothing"


@pytest.mark.parametrize("make", ["nothing", "no configuration"])
def test_a_path_that_is_not_a_run_is_refused_in_one_line(make: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if make == "no configuration":
        (path / "tapes").mkdir(parents=True)
    done = rankscope("train", "--resume", str(path), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("node", [(), ("0",), ("1",)])
def test_a_finished_run_says_so_and_ends_with_its_own_code(node: tuple[str, ...], tmp_path: Path) -> None:
    """On each node: one that waited for node 0, which is gone, would hold its machine for ever."""
    manifest = {"config": Config().model_dump(mode="json"), "world_size": 1}
    run = RunDir.create(tmp_path, name="old", manifest=manifest)
    folder = run.node_dir(0)
    folder.mkdir(parents=True)
    lines = [{"kind": "run_started", "wall_ns": 1}, {"kind": "run_ended", "wall_ns": 2, "reason": "finished"}]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"rank": -1, "attempt": 0, **line}) + "\n" for line in lines)
    )
    options = ["--set", "metrics.listen=127.0.0.1:0"]
    for rank in node:
        options += ["--nnodes", "2", "--node-rank", rank, "--rdzv-endpoint", "127.0.0.1:1"]
    done = rankscope("train", "--resume", str(run.path), *options, cwd=tmp_path)
    assert done.returncode == 6, done.stderr
    assert (
        done.stderr.strip()
        == f"rankscope: {run.path} has finished; nothing was started. To continue: --set train.steps=MORE."
    )
