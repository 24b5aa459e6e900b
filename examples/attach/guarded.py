"""A plain DDP script with Rankscope's guard: a poisoned batch is refused and the last good state restored.

torchrun --standalone --nproc-per-node 4 examples/attach/guarded.py --poison-step 30
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--poison-step", type=int, default=30, help="rank 1's batch here holds a NaN")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rankscope.attach(model, optimizer)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    guard = rankscope.guard(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, load)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        x = torch.randn(16, 64, generator=generator)
        if step == args.poison_step and dist.get_rank() == 1:
            x[3, 5] = float("nan")
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        rankscope.log(loss=loss)
        if guard.refuses(loss):
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    dist.barrier()


if __name__ == "__main__":
    main()
