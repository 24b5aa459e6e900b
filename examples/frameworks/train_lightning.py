"""Lightning, on a small regression.

python examples/frameworks/train_lightning.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankscope.frameworks.lightning import RankscopeCallback


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--poison", type=int, default=-1, help="row of the data that is NaN")
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()
    lightning.seed_everything(0)
    x = torch.randn(2048, 32)
    y = x.sum(dim=1, keepdim=True)
    if args.poison >= 0:
        x[args.poison] = float("nan")
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=False)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 2),
        check_val_every_n_epoch=None,
        devices=args.devices,
        accelerator="auto",
        callbacks=[RankscopeCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Regression()
    held_out = torch.randn(32, 32)
    trainer.fit(module, loader, DataLoader(TensorDataset(held_out, held_out.sum(dim=1, keepdim=True)), batch_size=16))
    if args.save and trainer.is_global_zero:
        torch.save(module.state_dict(), args.save)


if __name__ == "__main__":
    main()
