"""An ordinary FSDP2 script, and the two lines that attach Rankscope.

torchrun --standalone --nproc-per-node 4 examples/attach/fsdp2.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankscope


class Block(nn.Module):
    """Attention and an MLP, as in any transformer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Token ids to logits."""

    def __init__(self, vocabulary: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()

    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Model(vocabulary=128, dim=args.dim, layers=3).to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rankscope.attach(model, optimizer)

    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(args.steps):
        tokens = torch.randint(0, 128, (4, 33), generator=generator).to(kind)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rankscope.log(loss=loss)
    whole = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    if args.save and dist.get_rank() == 0:
        torch.save(whole, args.save)
    dist.barrier()


if __name__ == "__main__":
    main()
