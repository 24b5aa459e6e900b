"""torchtitan's Llama 3, its `ParallelDims` and its `parallelize_llama` (FSDP2, TP), in a custom loop on a CPU.

rankscope run --nproc-per-node 2 examples/frameworks/train_torchtitan.py
rankscope analyze runs/latest

torchtitan's trainer needs an accelerator. Two settings would not be needed on a GPU: the device type, and that FSDP2
sums its gradients, because gloo cannot average.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=args.tp, pp=1, ep=1, etp=1, world_size=dist.get_world_size()
    )
    dims.build_mesh()
    config = JobConfig()
    config.training.seq_len = 64
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.parallelism.disable_loss_parallel = True
    with torch.device("meta"):
        model = Transformer(TransformerModelArgs(dim=64, n_layers=4, n_heads=4, vocab_size=256, max_seq_len=64))
    parallelize_llama(model, dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank() // args.tp)
    for _ in range(args.steps):
        tokens = torch.randint(0, 256, (4, 64))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
