"""DDP over a model that torch.compile has compiled.

torchrun --nproc-per-node 2 compiled.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
model = DDP(torch.compile(model, backend="aot_eager"))
optimizer = torch.optim.Adam(model.parameters())
for _step in range(int(os.environ.get("STEPS", "400"))):
    x = torch.randn(16, 64)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
