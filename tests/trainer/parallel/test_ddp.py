"""A rank's own gradient before DDP reduces it, over two real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from trainer.parallel.ddp import watch_buckets

pytestmark = pytest.mark.timeout(120)

VALUES = {"healthy": 0.0, "large": 1e30, "nan": math.nan, "inf": math.inf}


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))


def step(ddp: DistributedDataParallel, rank: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    ddp(batch).square().mean().backward()
    return [weight.grad.clone() for weight in ddp.parameters() if weight.grad is not None]


def watched(rank: int, world_size: int) -> dict[str, Any]:
    plain, ddp = model(), model()
    inputs = watch_buckets(ddp)
    inputs.begin(0)
    found: dict[str, Any] = {"same": all(map(torch.equal, step(plain, rank), step(ddp, rank)))}
    added = [0.0]
    if rank == 1:  # in the gradient of one weight: nothing of it flows to the first layer
        ddp.module[1].weight.register_hook(lambda gradient: gradient + added[-1])
    for number, (name, value) in enumerate(VALUES.items(), start=1):
        added.append(value)
        inputs.begin(number)
        step(ddp, rank)
        found[name] = inputs.nonfinite(number)
    return found


def test_the_rank_whose_bucket_was_not_finite_is_known_and_nothing_else_changes() -> None:
    expected = {"same": True, "healthy": False, "large": False}
    assert run_ranks(watched, world_size=2) == [
        {**expected, "nan": False, "inf": False},
        {**expected, "nan": True, "inf": True},
    ]
