"""Ray Train with two workers on this machine, attached in the training function, which Ray runs in its workers.

python examples/frameworks/train_ray.py
python examples/frameworks/train_ray.py --slow 0.1
rankscope analyze runs/ray

Ray's workers run in another working folder, so the run's folder is given as an absolute path.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import rankscope

SLOW_FROM = 20


def train(settings: dict[str, Any]) -> None:
    """The training function that each worker runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, calls = ray.train.get_context().get_world_rank(), 0

    def delay(*unused: object) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > SLOW_FROM:
            time.sleep(settings["slow_s"])

    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    if settings["slow_s"]:
        net[1].register_forward_pre_hook(delay)
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rankscope.attach(model, optimizer, run_dir=settings["run_dir"])
    for _ in range(settings["steps"]):
        x = torch.randn(16, 32)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({"loss": loss.item()})
    rankscope.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds by which rank 1 is slower in forward")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/ray"))
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=100 << 20)
    settings = {"steps": args.steps, "slow_s": args.slow, "run_dir": str(args.run_dir.resolve())}
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train, train_loop_config=settings, torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=storage),
        ).fit()  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    main()
