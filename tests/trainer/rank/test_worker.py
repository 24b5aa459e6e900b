"""The worker as a process: under plain torchrun, stopped by a signal, restarted, and with a user's mistakes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from probes.guard.ledger import Ledger
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.forked import ForkedPython, run_python
from tests.waiting import wait_for
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.rank.worker import main

ROOT = Path(__file__).parents[3]
CONFIG = """
[run]
name = "worker"
dir = "{runs}"
[model]
dim = 32
num_layers = 1
num_heads = 2
[data]
path = ["{text}"]
cache_dir = "{runs}/cache"
seq_len = 16
[train]
steps = 12
global_batch_size = 4
device = "cpu"
[checkpoint]
interval = 4
memory_interval = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text(CONFIG.format(runs=tmp_path, text=__file__))
    return path


def command(config: Path, *arguments: str, ranks: int = 0, restarts: int = 0) -> list[str]:
    """One process, or `ranks` of them under torchrun."""
    worker = ["-m", "trainer.rank.worker", str(config), *arguments]
    if not ranks:
        return worker
    run = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return ["-m", "torch.distributed.run", *run, *worker]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    under_torchrun = "torch.distributed.run" in arguments
    return run_python(arguments, cwd=ROOT, env=os.environ | environment, forks_python=under_torchrun)


def events(run_dir: Path, attempt: int, rank: int) -> list[dict[str, Any]]:
    found, _, _ = read_events(RunDir(run_dir).rank_dir(attempt, rank) / "events.jsonl")
    return found


def kinds(run_dir: Path, attempt: int, rank: int) -> list[str]:
    return [event["kind"] for event in events(run_dir, attempt, rank)]


def test_torchrun_survives_a_killed_rank(config: Path, tmp_path: Path) -> None:
    faults = ("--fault", "kill@step=7,rank=1", "--fault", "failing_batch@batch=2")
    # Saved at once: in the background, the kill three steps later may come before the save is complete.
    done = run(command(config, "--set", "checkpoint.asynchronous=false", *faults, ranks=2, restarts=1))
    assert done.returncode == 0, done.stderr
    assert "step 12/12" in done.stdout
    folder = (tmp_path / "latest").resolve()
    assert list(tmp_path.glob("worker-*")) == [folder], "the restart continued the same run"
    assert kinds(folder, 0, 1)[-1] == "fault_injected"
    assert "exception" in kinds(folder, 0, 0), "its peer saw the connection break"
    for rank in (0, 1):
        assert kinds(folder, 1, rank)[-1] == "rank_closed"
    loaded = [event["step"] for event in events(folder, 1, 0) if event.get("state") == "loaded"]
    assert loaded == [4]
    ledger, _ = Ledger.load(folder / "checkpoints" / "ledger.json")
    assert list(ledger.skipped) == [2]
    assert checkpoint_steps(folder / "checkpoints")[-1] == 12
    manifest = RunDir(folder).manifest()
    assert manifest["num_parameters"] > 0
    assert manifest["flops_per_token"] > manifest["num_parameters"]
    assert manifest["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "ep": 1, "cp": 1, "tp": 1}
    assert "torch" in manifest["versions"]
    assert manifest["environment"]["OMP_NUM_THREADS"]


@later("probes/attach/test_watch_guard.py")
def test_a_watch_that_is_killed_under_torchrun_is_replaced(config: Path, tmp_path: Path) -> None:
    paced = ("--fault", "slow_data@step=1,rank=0,seconds=0.1")  # the cores are for what is started
    settings = ("--set", "train.steps=1000000", "--set", "checkpoint.interval=0")
    endless = command(config, *settings, *paced, ranks=2)
    process = ForkedPython(endless, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "latest").exists(), "the run's folder")
        path = RunDir(tmp_path / "latest").node_dir(0) / "events.jsonl"

        def said(kind: str) -> list[dict[str, Any]]:
            return [event for event in read_events(path)[0] if event["kind"] == kind] if path.exists() else []

        wait_for(lambda: said("watch_started"), "a watch")
        (first,) = said("watch_started")
        os.kill(first["pid"], signal.SIGKILL)
        wait_for(lambda: len(said("watch_started")) > 1, "another watch")
        assert [event["pid"] for event in said("watch_replaced")] == [first["pid"]]
    finally:
        process.terminate()
        assert process.wait(60) in (0, 1, -signal.SIGTERM)
    wait_for(lambda: said("watch_stopped"), "the end of the second watch")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(number: signal.Signals, config: Path, tmp_path: Path) -> None:
    """The whole process group gets it, as from a launcher or a terminal, so the data worker does too."""
    settings = ("train.steps=1000000", "checkpoint.interval=0", "data.num_workers=1")
    endless = command(config, *(text for setting in settings for text in ("--set", setting)))
    process = ForkedPython(endless, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    os.killpg(process.pid, number)
    process.stdout.read()
    assert process.wait(100) == 0
    (step,) = checkpoint_steps(tmp_path / "latest" / "checkpoints")
    assert step >= 3
    assert kinds(tmp_path / "latest", 0, 0)[-1] == "rank_closed"

    if number == signal.SIGINT:
        return
    folder = (tmp_path / "latest").resolve()
    again = run(command(config, "--set", f"train.steps={step + 2}"), RANKSCOPE_RUN_DIR=str(folder))
    assert again.returncode == 0, again.stderr
    assert "step 1/" not in again.stdout
    loaded = [event["step"] for event in events(folder, 1, 0) if event.get("state") == "loaded"]
    assert loaded == [step], "a new launch of the same run is a new attempt and goes on from there"


WITHOUT_DRAWING = """
import sys
from trainer.rank.worker import main
from trainer.training import rank_training

def refuse(*_):
    sys.exit("weights were drawn")

rank_training.initialise = refuse
sys.exit(main(sys.argv[1:]))
"""


def test_a_resume_draws_no_weights(config: Path, tmp_path: Path) -> None:
    """A rank of a large model would be busy with it for a minute, and what it draws is overwritten at once."""
    cannot_draw = ["-c", WITHOUT_DRAWING, str(config), "--set", "train.steps=6"]
    fresh = run(cannot_draw)
    assert (fresh.returncode, fresh.stderr) == (1, "weights were drawn\n")
    first = run(command(config, "--set", "train.steps=4"))
    assert first.returncode == 0, first.stderr
    resumed = run(cannot_draw, RANKSCOPE_RUN_DIR=str((tmp_path / "latest").resolve()))
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoint_steps(tmp_path / "latest" / "checkpoints") == [4, 6]


def test_a_batch_that_always_fails_ends_with_a_report(config: Path, tmp_path: Path) -> None:
    """Every step fails: the ladder is climbed to its end, once, and a restart does not climb it again."""
    faults = [text for step in range(3, 5) for text in ("--fault", f"nan_grad@step={step},rank=0")]
    budget = ("--set", "recovery.max_rollbacks=1")
    done = run(command(config, *faults, *budget))
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "recovery.max_rollbacks = 1 reached" in done.stderr
    folder = (tmp_path / "latest").resolve()
    assert (folder / "reports" / "guard-stop.json").exists()
    assert kinds(folder, 0, 0)[-2:] == ["run_stopped", "rank_closed"]
    again = run(command(config), RANKSCOPE_RUN_DIR=str(folder))
    assert again.returncode == 3
    assert "former attempt" in again.stderr


def test_an_exception_is_told_before_the_process_dies(config: Path, tmp_path: Path) -> None:
    done = run(command(config, "--fault", "exception@step=2,rank=0"))
    assert done.returncode == 1
    told = events(tmp_path / "latest", 0, 0)[-1]
    assert (told["kind"], told["type"], told["step"]) == ("exception", "RuntimeError", 2)
    assert "trainer/faults/injectors/process.py" in told["traceback"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.stepz=3"], "train.stepz"),
        (["--fault", "explode@step=1"], "unknown kind 'explode'"),
        (["--set", "parallel.tp=2"], "world size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith("rankscope: ")
    assert told.count("\n") == 1


def test_the_configuration_may_come_from_the_environment(config: Path, tmp_path: Path) -> None:
    from trainer.config.load import load_config

    given = load_config(config, ["train.steps=2"]).model_dump_json()
    done = run(["-m", "trainer.rank.worker"], RANKSCOPE_CONFIG=given)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


def test_a_broken_configuration_in_the_environment_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKSCOPE_CONFIG", '{"run": 3}')
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("rankscope: RANKSCOPE_CONFIG")


def test_a_port_in_use_is_one_line(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(
            command(config, "--set", "parallel.dp_shard=2"),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(taken.getsockname()[1]),
            RANK="0",
            WORLD_SIZE="2",
        )
    assert done.returncode == 2, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("rankscope:")]
    assert len(ours) == 1
    assert "in use" in ours[0]
    assert "Traceback" not in done.stderr
