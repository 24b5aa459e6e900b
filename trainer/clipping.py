"""The global gradient norm over every mesh dimension, and clipping by it.

    norm = gradient_norm(parameters, ranks_per_stage=4, device=device)     # one all-reduce of one number
    norm = gradient_norm(..., riders=row)                   # the same all-reduce sums the numbers in `row` too
    scale_gradients(parameters, clip_factor(norm, 1.0))

Each rank adds up the squares of the shards that it holds, divided by the number of ranks that hold the same shard;
one sum over all ranks then gives the square of the norm, whatever the mix of replicated, sharded and pipelined
parameters. The result is the same number on every rank, so all ranks come to the same verdict about it. A NaN or Inf
on any rank arrives in it everywhere; nothing is raised here, because what to do about it is for recovery to decide.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["clip_factor", "gradient_norm", "local_gradients", "scale_gradients", "settle_gradients"]


def settle_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give every gradient its parameter's placement on the tensor-parallel ranks.

    DTensor leaves the gradient of a norm under sequence parallel as a partial sum, and that of the vocabulary-parallel
    embedding whole on every rank. FSDP2 settles this itself; without FSDP the optimizer would redistribute in each of
    its operations, and who reads the local part would read a part of the truth.
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_gradients(parameters: Iterable[torch.nn.Parameter], ranks_per_stage: int) -> list[tuple[Tensor, int]]:
    """This rank's part of every gradient, with the number of ranks that hold the same part.

    `ranks_per_stage` is the number of ranks that hold the parameter at all: the world without the pipeline.
    """
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        copies = ranks_per_stage
        if isinstance(grad, DTensor):
            for dim, placement in enumerate(grad.placements):
                if placement.is_shard() or type(placement).__name__ == "_StridedShard":
                    copies //= grad.device_mesh.size(dim)
            grad = grad.to_local()
        if grad.numel():
            found.append((grad, copies))
    return found


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[torch.nn.Parameter],
    ranks_per_stage: int,
    device: torch.device,
    riders: Tensor | None = None,
) -> Tensor:
    """Global L2 norm, a float32 scalar on `device`, equal on all ranks. Collective over all ranks.

    `riders`, a row of float64 on `device`, is summed over all ranks in place by the same call: a step has one small
    reduction, and every further one costs the wait for the slowest rank again.
    """
    gradients = local_gradients(parameters, ranks_per_stage)
    # float64: the sum over all ranks then rounds the same way whatever the layout is, to float32's last bit.
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm([grad for grad, _ in gradients])
        # Divided by Python numbers, one group at a time: nothing is copied to the device and nothing waits for it.
        for copies in sorted({copies for _, copies in gradients}):
            group = [norm for norm, (_, other) in zip(norms, gradients, strict=True) if other == copies]
            total += torch.stack(group).double().square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        if riders is None:
            dist.all_reduce(total)
        else:
            row = torch.cat((total.view(1), riders))
            dist.all_reduce(row)
            total, riders[:] = row[0], row[1:]
    return total.sqrt().float()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients with so that their norm is at most `max_norm`; stays on the device.

    One for a norm that is not finite: a NaN factor would reach every gradient, and nobody could say which was bad.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    gradients = [grad for grad, _ in local_gradients(parameters, 1)]
    if gradients:
        torch._foreach_mul_(gradients, factor)
