"""Lightning Fabric with a custom loop.

torchrun --nproc-per-node 2 lightning_fabric.py
"""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ.get("WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(2048, 32), torch.randint(10, (2048,)))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
    model.train()
    for _ in range(int(os.environ.get("EPOCHS", "8"))):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), target)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
