"""A plain DDP loop whose rank 1 is slow in one place; knows nothing of Rankscope.

slow_ddp.py PLACE STEPS [SECONDS]
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLEEP_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02


class Sleeps(torch.autograd.Function):
    """Passes its input on; its backward pass calls `slow`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        slow("backward")
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> Any:
        slow("forward")
        return Sleeps.apply(self.layers(x))  # type: ignore[no-untyped-call]


def slow(place: str) -> None:
    if place != sys.argv[1] or dist.get_rank() != 1:
        return
    if place == "collection":
        begin = time.monotonic()
        while time.monotonic() - begin < SLEEP_S:
            gc.collect()
    else:
        time.sleep(SLEEP_S)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gc.freeze()  # a full collection of all that torch made would take far longer than `SLEEP_S`
    for _ in range(int(sys.argv[2])):
        slow("batch")
        x = torch.randn(16, 64)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        slow("after_forward")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        slow("clipping")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        slow("before_optimizer")
        slow("collection")
        optimizer.step()
        slow("after_optimizer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
