"""Real runs over gloo of which only the log is left: the rank and the cause out of torchrun's output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.finding import Finding
from tests.depth import later
from tests.forked import run_python

SCRIPT = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist

what, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.barrier()  # a rank may be long in coming
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=6))
size = 4
for step in range(20):
    print(f"step: {step} loss: {2.5 - 0.01 * step}", flush=True)
    if step == 10 and rank == 1:
        if what == "raise":
            raise ValueError("label 99 is out of range")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hang":
            time.sleep(600)
        if what == "memory":
            torch.empty(1 << 48)
        if what == "mismatch":
            size = 8
    dist.all_reduce(torch.ones(size))
"""


def analyzed(folder: Path, what: str, **variables: str) -> Finding:
    """Run it under torchrun, keep the output and nothing else, and diagnose that."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = run_python([*launcher, str(script), what], timeout_s=180, env=env, cwd=folder, forks_python=True)
    assert done.returncode != 0
    (folder / "logs").mkdir()
    (folder / "logs" / "job.log").write_text(done.stdout + done.stderr)
    fired = diagnose_files([folder / "logs"]).fired
    assert fired, done.stderr[-3000:]
    return fired[0]


def test_a_rank_that_raises(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "raise")
    assert (found.status, found.ranks, found.cause) == ("fired", (1,), "exception")
    assert "label 99" in found.summary


@later("a rank with a segmentation fault ends by a signal, too")
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "kill")
    assert (found.status, found.ranks, found.cause) == ("suspect", (1,), "signal")


def test_a_rank_with_a_segmentation_fault(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "segfault")
    assert (found.status, found.ranks, found.cause) == ("fired", (1,), "signal")


def test_a_rank_without_memory(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "memory")
    assert (found.status, found.ranks, found.cause) == ("fired", (1,), "host_out_of_memory")


@pytest.mark.parametrize(
    "mode", ["OFF", pytest.param("DETAIL", marks=later("test_incidents.py: its texts, as they were printed"))]
)
def test_sizes_that_differ(tmp_path: Path, mode: str) -> None:
    found = analyzed(tmp_path, "mismatch", TORCH_DISTRIBUTED_DEBUG=mode)
    assert found.cause == "mismatch_size"
    assert not found.ranks or 1 in found.ranks


@later("test_incidents.py: the texts of time-outs, as they were printed")
def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "hang")
    assert found.status == "suspect"
    assert found.kind in ("hang", "rank_lost")
    assert set(found.ranks) <= {1}
