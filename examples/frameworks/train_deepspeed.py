"""DeepSpeed with ZeRO over gloo, on a small regression.

DS_ACCELERATOR=cpu rankscope run --nproc-per-node 2 examples/frameworks/train_deepspeed.py --stage 3
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Its shared-memory collectives would have to be compiled, and bypass torch.distributed, where calls are recorded.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), dist_init_required=False, config=settings
    )
    for _ in range(args.steps):
        x = torch.randn(8, 64)
        loss = nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
