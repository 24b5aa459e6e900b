"""Lightning Fabric with a custom loop, on a small regression.

python examples/frameworks/train_fabric.py
torchrun --standalone --nproc-per-node 2 examples/frameworks/train_fabric.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankscope


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--poison", type=int, default=-1, help="row of the data that is NaN")
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()
    fabric = Fabric(accelerator="auto", strategy="ddp", devices=int(os.environ.get("WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(2048, 32)
    y = x.sum(dim=1, keepdim=True)
    if args.poison >= 0:
        x[args.poison] = float("nan")
    net: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=False))
    rankscope.attach(model, optimizer)
    step = 0
    while step < args.steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            step += 1
            if step == args.steps:
                break
    if args.save and fabric.is_global_zero:
        torch.save(net.state_dict(), args.save)


if __name__ == "__main__":
    main()
