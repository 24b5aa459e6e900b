"""DDP with a custom optimizer (Lion), as published in its paper.

torchrun --nproc-per-node 2 custom_optimizer.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)))
optim = Lion(net.parameters(), lr=1e-4, weight_decay=1e-2)
for _ in range(int(os.environ.get("STEPS", "400"))):
    batch = torch.randn(32, 32)
    optim.zero_grad()
    ((net(batch) - batch) ** 2).mean().backward()
    optim.step()
dist.destroy_process_group()
