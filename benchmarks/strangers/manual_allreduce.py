"""Data parallel by hand: gradients are averaged by an all-reduce for each parameter, as in the PyTorch tutorial.

torchrun --nproc-per-node 2 manual_allreduce.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run():
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(int(os.environ.get("STEPS", "400"))):
        data = torch.randn(32, 32, generator=generator)
        target = torch.randint(10, (32,), generator=generator)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        average_gradients(model)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
