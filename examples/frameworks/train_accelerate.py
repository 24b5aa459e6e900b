"""Accelerate, with Rankscope as its tracker.

python examples/frameworks/train_accelerate.py
accelerate launch --num_processes 2 examples/frameworks/train_accelerate.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankscope.frameworks.accelerate import RankscopeTracker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--poison", type=int, default=-1, help="row of the data that is NaN")
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()
    accelerator = Accelerator(log_with=RankscopeTracker(), cpu=not torch.cuda.is_available())
    accelerator.init_trackers("sums", config={"lr": 1e-3})
    torch.manual_seed(0)
    x = torch.randn(2048, 32)
    y = x.sum(dim=1, keepdim=True)
    if args.poison >= 0:
        x[args.poison] = float("nan")
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < args.steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss.item()}, step=step)
            step += 1
            if step == args.steps:
                break
    if args.save and accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
