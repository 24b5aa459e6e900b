"""A vision classifier under DDP with a DataLoader, a sampler, evaluation after each epoch and a saved checkpoint.

torchrun --nproc-per-node 2 vision_ddp.py
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, criterion, optimizer):
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = sum((model(images).argmax(1) == target).sum().item() for images, target in loader)
    return correct / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, target = torch.randn(640, 3, 16, 16), torch.randint(10, (640,))
    dataset = TensorDataset(images, target)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    val_loader = DataLoader(TensorDataset(images[:64], target[:64]), batch_size=32)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    folder = tempfile.mkdtemp()
    for epoch in range(int(os.environ.get("EPOCHS", "12"))):
        sampler.set_epoch(epoch)
        train(model, loader, criterion, optimizer)
        accuracy = validate(model.module, val_loader)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
            torch.save({"epoch": epoch, "state_dict": model.module.state_dict()}, f"{folder}/checkpoint.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
