"""A 1F1B pipeline by torch.distributed.pipelining with unequal stages.

torchrun --nproc-per-node 2 pipeline_1f1b.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dim, n_microbatches = 64, 4


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    depth = 6 if rank == 0 else 2  # not balanced
    module = nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(depth)))
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches, loss_fn=nn.MSELoss())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(int(os.environ.get("STEPS", "400"))):
        x = torch.randn(64, dim)
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=torch.randn(64, dim))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
