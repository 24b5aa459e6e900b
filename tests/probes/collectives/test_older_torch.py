"""Up to torch 2.7 a caller waits for what every call returns, and C++ forgets what a handle of Python does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from probes.collectives import recorded_method
from probes.collectives.work_handle import RecordedWork
from probes.collectives.wrapped import is_recorded_here
from probes.tape.format.writer import COMPLETE
from tests.probes.recorded_world import recorded_world, rows
from tests.processes import run_ranks

OLDER = """
def all_reduce(group, tensor, async_op=False):
    work = group.allreduce([tensor], AllreduceOptions())
    if async_op:
        return work
    work.wait()
"""


def _calls(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    recorded_method._HAS_ASYNC_OPTION = False
    names: dict[str, Any] = {"AllreduceOptions": dist.AllreduceOptions}
    exec(compile(OLDER, c10d.__file__, "exec"), names)
    with recorded_world(rank, world_size, folder) as recorder:
        group: Any = dist.group.WORLD
        assert names["all_reduce"](group, torch.ones(2)) is None
        handle = names["all_reduce"](group, torch.ones(3), async_op=True)
        assert type(handle) is RecordedWork
        handle.wait()
        assert type(group.allreduce([torch.ones(4)], dist.AllreduceOptions())) is not RecordedWork
        dist._broadcast_coalesced(group, [torch.ones(7)], 1 << 20, 0)
        model = DistributedDataParallel(nn.Linear(5, 1))
        model(torch.ones(1, 5)).sum().backward()
    return rows(recorder.directory, "collectives")


def test_calls_of_an_older_torch_are_recorded(tmp_path: Path) -> None:
    found, _ = run_ranks(_calls, world_size=2, args=(str(tmp_path),))
    assert all(row["state"] == COMPLETE for row in found)
    (buffers,) = (row for row in found if (row["op"], row["shape"]) == ("broadcast", "7"))
    assert not buffers["is_async"]
    assert buffers["wait_ns"] > 0
    assert [(row["shape"], row["is_async"]) for row in found if row["op"] == "all_reduce"] == [
        ("2", False), ("3", True), ("4", True), ("6", True),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "is_recorded"), [("gloo", True), ("nccl", False)])
def test_a_backend_that_does_not_say_if_it_batches_is_known_by_its_name(name: str, is_recorded: bool) -> None:
    class Backend:
        def name(self) -> str:
            return name

    class Group:
        _device_types = (torch.device("cpu"),)

        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    assert is_recorded_here(Group()) == is_recorded
