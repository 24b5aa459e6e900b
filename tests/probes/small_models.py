"""Small models under each kind of parallelism, for workers of `run_ranks`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 16
BATCH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Slow(torch.autograd.Function):
    """The identity, taking a while in forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Net(nn.Module):
    """Three blocks; `delay_s` is the extra time of the middle one in (forward, backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.delay_s = (0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and any(self.delay_s):
                x = Slow.apply(x, *self.delay_s)
        return x


def parallel_net(kind: str) -> tuple[nn.Module, Net]:
    """Callable and network: `ddp`, `fsdp`, `hsdp`, `tp` or `fsdp_tp` over all ranks."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002), net
    if kind == "fsdp":
        mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    elif kind == "tp":
        mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    elif kind == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_shard", "tp"))
    if "tp" in kind:
        for block in net.blocks:
            tp_mesh = mesh["tp"] if mesh.ndim > 1 else mesh
            parallelize_module(block, tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "tp":
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp_shard"] if kind == "fsdp_tp" else mesh)
        fully_shard(net, mesh=mesh["dp_shard"] if kind == "fsdp_tp" else mesh)
    return net, net


def batch(step: int, seed: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + seed))


def train(kind: str, recorder: Any, steps: int, delay_s: Callable[[int], tuple[float, float]] | None = None) -> Net:
    """Train for some steps; ranks that share a tensor-parallel group read the same data."""
    forward, net = parallel_net(kind)
    seed = 0 if kind == "tp" else dist.get_rank() // (2 if kind == "fsdp_tp" else 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        if delay_s is not None:
            net.delay_s = delay_s(step)
        with recorder.step(step):
            with recorder.span("forward"):
                loss = forward(batch(step, seed)).square().mean()
            with recorder.span("backward"):
                loss.backward()
            with recorder.span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return net


def pipeline(microbatches: int = 4) -> tuple[PipelineStage, Schedule1F1B]:
    """One stage a rank under 1F1B, with the shapes given."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    tokens = torch.zeros(BATCH // microbatches, WIDTH)
    hidden = tokens.clone().requires_grad_()  # tells torch that a gradient comes back
    inputs = tokens if rank == 0 else hidden
    stage = PipelineStage(Block(), rank, world, torch.device("cpu"), input_args=(inputs,), output_args=(hidden,))
    return stage, Schedule1F1B(stage, microbatches, loss_fn=lambda output, target: (output - target).square().mean())
