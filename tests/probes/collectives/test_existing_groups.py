"""A DDP that exists when the process attaches trains on as its script has set it up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from probes.attach.attach import attach, detach
from probes.collectives.wrapped import RecordedGroup
from probes.tape.rundir import RunDir
from store import Store


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(4, 1))
    detach()
    dist.destroy_process_group()


def train(ddp: Any, run_dir: Path) -> list[tuple[object, ...]]:
    """Train a step after attaching; returns the numbers of recorded all-reduces."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach(ddp, optimizer, run_dir=run_dir, watch=False)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    detach()
    with Store.open(RunDir(run_dir)) as store:
        return store.rows("SELECT count(*) > 0 FROM collectives WHERE op = 'all_reduce'")


def test_the_all_reduces_of_a_ddp_are_recorded(ddp: Any, tmp_path: Path) -> None:
    assert train(ddp, tmp_path / "run") == [(True,)]


def test_a_builtin_communication_hook_stays_registered(ddp: Any, tmp_path: Path) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert train(ddp, tmp_path / "run") == [(False,)]
    with pytest.raises(RuntimeError, match="register_comm_hook"):  # DDP accepts one hook
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def test_a_ddp_trains_unrecorded_if_its_reducer_cannot_be_rebuilt(
    ddp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = dist.Reducer

    def reducer(parameters: Any, buckets: Any, sizes: Any, group: Any, *rest: Any, **named: Any) -> Any:
        if type(group) is RecordedGroup:
            raise RuntimeError("out of memory")
        return make(parameters, buckets, sizes, group, *rest, **named)

    monkeypatch.setattr(dist, "Reducer", reducer)
    assert train(ddp, tmp_path / "run") == [(False,)]
    assert ddp.module.weight.grad is not None
