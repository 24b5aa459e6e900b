"""A launcher that is killed by SIGKILL: its ranks end too, and the run says why it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from analyzers.finding import Finding
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.e2e.launched import start
from tests.forked import ForkedPython
from tests.waiting import wait_for
from watch.processes import is_alive
from watch.verdicts.diagnosed_run import diagnosed_run

SCRIPT = """
import signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


def _events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.node_dir(0) / "events.jsonl")[0] if event["kind"] == kind]


def _finding(run: RunDir) -> Finding:
    with diagnosed_run(run, is_over=True) as (_, diagnosis):
        return diagnosis.fired[0]


def test_ranks_of_the_trainer_save_and_end_with_their_launcher(tmp_path: Path) -> None:
    run = start(tmp_path, "ddp", settings=["train.steps=100000", "checkpoint.interval=0"])
    wait_for(lambda: run.pids().keys() >= {0, 1, 2, 3} and _steps(run.run), "steps")
    os.kill(run.process.pid, signal.SIGKILL)
    pids = run.pids().values()
    wait_for(lambda: not any(map(is_alive, pids)), "the end of the ranks")
    wait_for(lambda: bool(run.events("watch_stopped")), "the end of watch")
    assert run.is_saved()
    (ended,) = run.events("run_ended")
    assert ended["reason"] == "launcher_lost"
    finding = _finding(run.run)
    assert (finding.kind, finding.cause, finding.ranks) == ("rank_lost", "launcher_lost", (0, 1, 2, 3))
    assert "saved a checkpoint at step" in finding.summary


def test_ranks_of_a_script_end_with_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "rankscope", "run", "--nproc-per-node", "2", "train.py"]
    launcher = ForkedPython(
        command, forks_python=True, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    latest = tmp_path / "runs" / "latest"
    wait_for(lambda: latest.exists() and len(_pids(RunDir(latest))) == 2, "the ranks")
    run = RunDir.open(latest)
    pids = _pids(run)
    wait_for(lambda: bool(_events(run, "watch_started")), "watch")
    os.kill(_events(run, "watch_started")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: bool(_events(run, "watch_replaced")), "another watch, which the launcher starts")
    wait_for(lambda: len(_events(run, "watch_started")) == 2, "its start")
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_alive, pids)), "the end of the ranks")
    wait_for(lambda: bool(_events(run, "watch_stopped")), "the end of watch")
    assert _events(run, "run_ended")[0]["reason"] == "launcher_lost"
    assert _finding(run).cause == "launcher_lost"


def _steps(run: RunDir) -> bool:
    return any((folder / "steps.00000.tape").exists() for _, _, folder in run.rank_dirs())


def _pids(run: RunDir) -> list[int]:
    events = [event for _, _, folder in run.rank_dirs() for event in read_events(folder / "events.jsonl")[0]]
    return [event["pid"] for event in events if event["kind"] == "rank"]
