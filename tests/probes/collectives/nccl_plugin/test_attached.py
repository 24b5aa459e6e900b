"""An attached training script with NCCL played in its steps: from `attach` to rows of the store."""

from __future__ import annotations

import os
from pathlib import Path

from probes.tape.rundir import RunDir
from store.reader import Store
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import os
import torch
from tests.support.played.nccl_interface import PlayedNccl

nccl = PlayedNccl(os.environ["NCCL_PROFILER_PLUGIN"], version=6)
comm = nccl.communicator(name="dp", comm_hash=0xFACADE << 40, num_ranks=1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    comm.collective("AllReduce", count=20, channels=2).run(2)
    optimizer.step()
    optimizer.zero_grad()
stuck = comm.collective("AllReduce", count=20, channels=2)
stuck.launched()
stuck.kernel(0, 10)
"""


def test_calls_of_an_attached_script_belong_to_its_steps(plugin_library: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RANKSCOPE_RUN_DIR": str(tmp_path / "run"),
        "RANKSCOPE_NCCL_PLUGIN": str(plugin_library),
        "RANKSCOPE_FAIL_LOUD": "1",
    }
    done = run_python(["-m", "rankscope.attached_script", "train.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    run = RunDir.open(tmp_path / "run")
    with Store.open(run) as store:
        found = store.rows("SELECT step, seq, op, bytes, process_group, end_ns IS NULL FROM collectives ORDER BY seq")
        [(state, reason)] = store.rows(
            "SELECT detail ->> 'state', detail ->> 'reason' FROM events WHERE kind = 'nccl_plugin'"
        )
        [stuck] = store.rows(
            "SELECT launched_ns IS NULL, channels_started, channels_stopped FROM nccl_calls WHERE kernel_end_ns IS NULL"
        )
    assert (state, reason) == ("set", None)
    assert [row[1:] for row in found] == [(seq, "all_reduce", 80, "dp:n=1@facade", seq == 5) for seq in range(6)]
    assert [row[0] for row in found[:5]] == [1, 2, 3, 4, 5]
    assert stuck == (False, 1, 0)
