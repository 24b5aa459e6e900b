"""`rankscope run` on a script that starts its ranks itself: they are the ranks of the run, and their ends are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from store import Store
from tests.depth import usually
from tests.forked import run_python
from tests.ports import free_port

SCRIPT = """
import os, sys
import torch, torch.multiprocessing as mp
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel

def main(rank, world_size, end):
    torch.set_num_threads(1)
    init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(30):
        loss = model(torch.randn(8, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20 and rank == 1:
            if end == "kill":
                os.kill(os.getpid(), 9)
            if end == "raise":
                raise ValueError("a bad sample")

if __name__ == "__main__":
    how, end, os.environ["MASTER_PORT"] = sys.argv[1:]
    os.environ["MASTER_ADDR"] = "localhost"
    if how == "mp.spawn":
        mp.spawn(main, args=(2, end), nprocs=2)
    else:
        ranks = [mp.get_context(how).Process(target=main, args=(rank, 2, end)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        sys.exit(max(abs(rank.exitcode) for rank in ranks))
"""
ENDS = usually(
    {
        "mp.spawn": ("raise", "Rank 1 died of ValueError: a bad sample (train.py:23 in main) at step 21"),
        "fork": ("kill", "Rank 1 died of SIGKILL at step 21"),
        "spawn": ("raise", "Rank 1 died of ValueError: a bad sample (train.py:23 in main) at step 21"),
        "forkserver": ("none", "No problems found (30 steps, 2 ranks)"),
    },
    later=["fork", "spawn", "forkserver"],
)


@pytest.mark.parametrize("how", ENDS)
def test_ranks_that_the_script_starts_are_those_of_the_run(tmp_path: Path, how: str) -> None:
    end, words = ENDS[how]
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "rankscope", "run", "--run-dir", "run", "train.py", how, end, str(free_port())]
    done = run_python(command, cwd=tmp_path, timeout_s=200)
    assert words in done.stderr.replace(f"{tmp_path.name}/", "").replace("\n", " ")
    run = RunDir(tmp_path / "run")
    assert run.manifest()["world_size"] == 2
    with Store.open(run) as store:
        steps = store.rows("SELECT attempt, rank, max(step) FROM steps GROUP BY ALL ORDER BY ALL")
    assert [(attempt, rank) for attempt, rank, _ in steps] == [(0, 0), (0, 1)]
    assert min(step for *_, step in steps) >= 20
