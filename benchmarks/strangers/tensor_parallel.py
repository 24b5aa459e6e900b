"""A feed-forward network with DTensor's tensor parallelism, as in PyTorch's examples.

torchrun --nproc-per-node 2 tensor_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(32, 128)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(128, 32)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


dist.init_process_group("gloo")
torch.set_num_threads(1)
device_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
tp_model = parallelize_module(ToyModel(), device_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=1e-3, foreach=True)
for i in range(int(os.environ.get("STEPS", "400"))):
    torch.manual_seed(i)  # every rank has the same input
    inp = torch.rand(20, 32)
    output = tp_model(inp)
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
