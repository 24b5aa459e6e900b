"""`rankscope run` on a script that knows nothing of it: how its ranks end, and what the terminal shows of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import usually
from tests.forked import run_python
from tests.ports import free_port

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1] == "import" and os.environ["RANK"] == "0":  # the rank that announces the run
    raise SystemExit("no data here")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(30):
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20 and dist.get_rank() == 1:
        if sys.argv[1] == "exit":
            os._exit(0)
        if sys.argv[1] == "return":
            break
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[1] == "raise":
            raise ValueError("a bad sample")
"""


LARGE_BATCH = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 30 and sys.argv[1] == "busy":
            begin = time.process_time()
            while time.process_time() - begin < 8:
                sum(range(10_000))
        while index == 30 and sys.argv[1] == "blocked" and not is_reported():
            time.sleep(0.2)
        return torch.randn(64)

def is_reported():
    return any('"analyzer":"hang"' in path.read_text() for path in Path("runs").rglob("events.jsonl"))

model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader(Data()):
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("doing", ["busy", "blocked"])
def test_a_fetch_longer_than_the_hang_limit_is_a_hang_unless_it_computes(tmp_path: Path, doing: str) -> None:
    (tmp_path / "train.py").write_text(LARGE_BATCH)
    done = run_python(["-m", "rankscope", "run", "train.py", doing], cwd=tmp_path, timeout_s=200, forks_python=True)
    assert done.returncode == 0, done.stderr
    assert ("HANG" in done.stderr) == (doing == "blocked"), done.stderr
    assert ("Rank 0 stalled" in done.stderr) == (doing == "blocked"), done.stderr


def run(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = ["-m", "rankscope", "run", "--nproc-per-node", "2", "train.py", end]
    return run_python(command, cwd=folder, timeout_s=200, forks_python=True)


ENDS = usually(
    {
        "exit": ("Rank 1 ended with exit code 0 at step 21", 0),
        "return": ("Rank 1 ended with exit code 0 at step 21", 0),
        "kill": ("Rank 1 died of SIGKILL at step 21", -9),
        "raise": ("Rank 1 died of ValueError: a bad sample (train.py:", 1),
    },
    later=["return", "kill", "exit"],
)


@pytest.mark.parametrize("end", ENDS)
def test_the_rank_that_ended_is_named_with_its_code(tmp_path: Path, end: str) -> None:
    verdict, code = ENDS[end]
    done = run(tmp_path, end)
    assert done.returncode == 1
    (run_dir,) = (tmp_path / "runs").glob("train-*")
    assert f"Recording to runs/{run_dir.name}" in done.stderr
    assert f"Verdict  {verdict}" in done.stderr, done.stderr
    assert f"rankscope analyze runs/{run_dir.name}" in done.stderr
    events = read_events(RunDir(run_dir).node_dir(0) / "events.jsonl")[0]
    # Rank 0 loses its connection and may be gone before the launcher looks again: the order of the two is no promise.
    codes = {event["exit_rank"]: event["exit_code"] for event in events if event["kind"] == "rank_exit"}
    assert codes[1] == code


def test_a_script_that_fails_before_it_trains_is_no_clean_run(tmp_path: Path) -> None:
    done = run(tmp_path, "import")
    assert done.returncode == 1
    assert "no data here" in done.stderr
    assert "No problems found" not in done.stderr
    verdict = done.stderr.split("Verdict")[1]
    assert "exit code 1: no data here (train.py:8 in <module>) before the first step" in verdict


def test_a_rendezvous_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", where]
    alone = ["--rdzv-conf", "is_host=false,read_timeout=2"]  # and no other node holds the store
    command = ["-m", "rankscope", "run", *options, *alone, "train.py", "no"]
    done = run_python(command, cwd=tmp_path, timeout_s=200)
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert sum(line.startswith(f"rankscope: --rdzv-endpoint {where}: no rendezvous") for line in told) == 1, told
    assert "Traceback" not in done.stderr
