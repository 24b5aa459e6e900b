"""torchtune's Llama 3, sharded by its `shard_model` (FSDP2), in a custom loop, because its recipes need weights.

rankscope run --nproc-per-node 2 examples/frameworks/train_torchtune.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtune.models.llama3 import llama3
from torchtune.training import shard_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = llama3(vocab_size=256, num_layers=4, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    shard_model(
        model, shard_conditions=[lambda name, _: name.startswith("layers.") and name.count(".") == 1],
        cpu_offload=False, dp_mesh=mesh,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        tokens = torch.randint(0, 256, (4, 64))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
