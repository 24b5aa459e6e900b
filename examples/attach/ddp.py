"""An ordinary DDP script, and the two lines that attach Rankscope.

torchrun --standalone --nproc-per-node 4 examples/attach/ddp.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import rankscope


class Sums(Dataset):
    """Rows of noise and their sums."""

    def __init__(self, size: int, poison: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 64, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)
        if poison >= 0:
            self.x[poison] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--poison", type=int, default=-1, help="row of the data that is NaN")
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()

    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU())
    model = DDP(nn.Sequential(model, nn.Linear(args.width, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rankscope.attach(model, optimizer)

    data = Sums(4096, args.poison)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            rankscope.log(loss=loss)
            step += 1
            if step == args.steps:
                break
        epoch += 1
    if args.save and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()


if __name__ == "__main__":
    main()
