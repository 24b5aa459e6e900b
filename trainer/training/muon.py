"""Muon for the matrices of the blocks, AdamW for all other parameters, in one optimizer.

    optimizer = MuonAdamW(groups, momentum=0.95, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)

Groups with `muon = True` have matrices only. The momentum of each matrix is orthogonalised by five Newton-Schulz
iterations in bf16, as in `torch.optim.Muon` (Jordan et al. 2024), and scaled to the size of AdamW's update (Liu et al.
2025, arXiv 2502.16982), so that one learning rate and one weight decay serve both. The iterations need whole matrices.
If a matrix is sharded its momentum stays sharded; each rank gathers the whole update, orthogonalises it, and keeps its
own part, which gives the same bits as an unsharded matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.training.adamw_fallback import AdamWFallback, local_tensor

__all__ = ["MuonAdamW", "orthogonalised", "rate_ratio"]

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


class MuonAdamW(AdamWFallback):
    """Muon for the groups that are marked, AdamW for the others."""

    mark = "muon"

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, {"momentum": momentum}, **adamw)

    def _update(self, parameter: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.detach())
        assert parameter.grad is not None
        own, gradient = local_tensor(parameter), local_tensor(parameter.grad)
        before = local_tensor(state["momentum_buffer"])
        momentum = before.lerp(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])  # Nesterov momentum
        direction = _own_part(orthogonalised(_whole(update, parameter)), parameter)
        changed = own * (1 - group["lr"] * group["weight_decay"])
        changed.add_(direction, alpha=-group["lr"] * rate_ratio(parameter.shape))
        if skipped is not None:
            momentum, changed = torch.where(skipped, before, momentum), torch.where(skipped, own, changed)
        before.copy_(momentum)
        own.copy_(changed)


def orthogonalised(update: Tensor) -> Tensor:
    """Return a bf16 matrix with the singular vectors of a float32 matrix and singular values near 1."""
    is_tall = update.size(0) > update.size(1)
    matrix = update.bfloat16()
    if is_tall:
        matrix = matrix.T
    matrix.div_(matrix.norm().clamp(min=SMALLEST_NORM))
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if is_tall else matrix


def rate_ratio(shape: torch.Size) -> float:
    """Factor of the learning rate that gives an orthogonalised update the size of AdamW's."""
    return 0.2 * math.sqrt(max(shape))


def _whole(update: Tensor, parameter: Tensor) -> Tensor:
    """Gather the whole update from the ranks' parts. Collective if the parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return update
    sharded = DTensor.from_local(
        update,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded.full_tensor()


def _own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of the update, without communication."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
