"""One launch is one job, also where each rank has a wrapper process; the next launch is another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_python

REPOSITORY = Path(__file__).parents[3]
RANK = (
    "from probes.attach.launch.identity import Identity as I; i = I.from_environment(); "
    "print(i.rank, i.world_size, i.job())"
)
LAUNCHER = """
import os, subprocess, sys
for rank in range(2):
    given = {name: value.format(rank) for name, value in (pair.split("=") for pair in sys.argv[1].split(","))}
    subprocess.run(sys.argv[2:], env={**os.environ, **given}, check=True)
"""
SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
WRAPPER = 'if [ -z "$RANK" ]; then export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS; fi; "$@"; true'


def launched(variables: str, *wrapper: str, **outer: str) -> list[tuple[str, str, str]]:
    """(rank, world size, job) of the two ranks of a launcher that gives them these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_LAUNCHERS}
    environment |= {"PYTHONPATH": str(REPOSITORY), **outer}
    command = [sys.executable, "-c", LAUNCHER, variables, *wrapper, sys.executable, "-c", RANK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return [tuple(line.split()) for line in done.stdout.splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variables", "outer"),
    [
        ("RANK={},WORLD_SIZE=2", {}),
        ("RANK={},WORLD_SIZE=2,TORCHELASTIC_RUN_ID=none,LOCAL_WORLD_SIZE=2", {}),
        ("SLURM_PROCID={},SLURM_NTASKS=2,SLURM_STEP_ID=0,SLURM_JOB_ID=7", {}),
        # A shell of an allocation, in which a launcher was started by hand.
        ("RANK={},WORLD_SIZE=2", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}),
    ],
)
def test_ranks_behind_a_wrapper_each_are_one_job_and_the_next_launch_is_another(
    variables: str, outer: dict[str, str]
) -> None:
    wrapper = ("bash", "-c", WRAPPER, "wrapper")
    first, second = launched(variables, *wrapper, **outer), launched(variables, *wrapper, **outer)
    assert [place[:2] for place in first] == [("0", "2"), ("1", "2")]
    assert len({job for *_, job in first}) == 1
    assert {job for *_, job in first} != {job for *_, job in second}
    assert len({job for *_, job in launched(variables, **outer)}) == 1, "without a wrapper"


STARTED = """
import multiprocessing, os
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from probes.attach.launch.identity import Identity

def rank():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    found = Identity.from_environment().in_group()
    print(found.rank, found.local_rank, found.node_rank, found.node_size(), found.is_one_node(), flush=True)

started = multiprocessing.get_context("fork").Process(target=rank)
started.start()
started.join()
"""


def test_a_rank_that_a_node_s_only_process_started_has_its_place_from_the_group() -> None:
    """Two nodes, two ranks on each; the script has set RANK for them, as tutorials do."""
    of_launcher = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    nodes = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **of_launcher, **nodes}
    done = run_python(["-c", STARTED], cwd=REPOSITORY, env=environment)
    assert done.stdout.split() == ["3", "1", "1", "2", "False"], done.stderr
