"""Megatron-core's tensor-parallel layers in a custom loop, because its training loop needs CUDA.

rankscope run --nproc-per-node 2 examples/frameworks/train_megatron.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn


class Mlp(nn.Module):
    """Two layers, divided over the tensor-parallel ranks."""

    def __init__(self, config: ModelParallelConfig, width: int) -> None:
        super().__init__()
        init = nn.init.xavier_uniform_
        self.up = ColumnParallelLinear(width, 4 * width, config=config, init_method=init, gather_output=False)
        self.down = RowParallelLinear(
            4 * width, width, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.up(x)
        out, _ = self.down(nn.functional.gelu(hidden))
        return x + out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(0)
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, params_dtype=torch.float32
    )
    model = nn.Sequential(*(Mlp(config, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        x = torch.randn(32, 64)  # the same on all ranks, which share one seed
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
