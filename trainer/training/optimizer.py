"""The optimizer and the learning rate.

    optimizer = build_optimizer(modules, config.optim)
    optimizer = build_optimizer(modules, config.optim, shared_by=replicas)     # ZeRO-1: replicas share the state
    optimizer_state(optimizer)                                                 # this rank's part of the state
    set_learning_rate(optimizer, learning_rate(step, config))

The rate is a pure function of the step, so there is no scheduler to save, to restore or to rewind after a rollback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.config import Config, OptimConfig
from trainer.training import adamw8bit, adamw_on_host
from trainer.training.adamw8bit import AdamW8bit, is_eight_bit
from trainer.training.adamw_on_host import AdamWOnHost
from trainer.training.muon import MuonAdamW

__all__ = [
    "build_optimizer",
    "empty_state",
    "learning_rate",
    "named_parameters",
    "optimizer_state",
    "set_learning_rate",
    "state_keys",
    "updated_here",
]


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of optimizer step `step`, which starts at 0.

    1. The highest rate is `lr`, times global batch / `reference_batch_size` if that is set (linear scaling).
    2. Warm-up: step k of w has (k + 1) / w of the highest rate.
    3. After warm-up, `cosine` and `linear` decay to `min_lr_ratio` x the highest rate at the last step. `wsd` is
       constant, and falls linearly in the last `decay_ratio` of the steps. `constant` does not decay.
    """
    optim, steps = config.optim, config.train.steps
    highest = optim.lr
    if optim.reference_batch_size:
        highest *= config.train.global_batch_size / optim.reference_batch_size
    if step < optim.warmup_steps:
        return highest * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return highest
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        start = max(start, round(steps * (1 - optim.decay_ratio)))
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return highest * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the rank's model parts with their names, each parameter once. Tied parameters have their first
    name."""
    for module in modules:
        yield from module.named_parameters()


def build_optimizer(
    modules: list[nn.Module],
    config: OptimConfig,
    *,
    shared_by: dist.ProcessGroup | None = None,
    on_host: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimizer of `modules`, with state sharded like their parameters. Norms, biases and the embedding have
    no weight decay.

    `shared_by`: replicas that each update some of the parameters and send them to the others (ZeRO-1). Whole parameters
    are assigned to replicas, the largest first, so that the shares are about equal. `on_host`: AdamW's moments stay in
    host memory.
    """
    groups: dict[object, dict[str, Any]] = {}
    for name, parameter in named_parameters(modules):
        decays = parameter.dim() >= 2 and not name.startswith("embed.")
        muon = config.name == "muon" and parameter.dim() == 2 and name.startswith("blocks.")
        eight_bit = config.name == "adamw8bit" and is_eight_bit(name, parameter)
        # torch's multi-tensor kernels accept either plain tensors or DTensors of one mesh, but not both at once.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        marks = {"muon": muon, "eight_bit": eight_bit}
        group = groups.setdefault(
            (decays, mesh, muon, eight_bit),
            {"params": [], "names": [], **marks, "weight_decay": config.weight_decay if decays else 0.0},
        )
        group["params"].append(parameter)
        group["names"].append(name)
    if on_host:
        return AdamWOnHost(list(groups.values()), lr=config.lr, betas=config.betas, eps=config.eps)
    # With DTensors each operation costs the host one dispatch per parameter. Fused AdamW has one operation, the foreach
    # implementation a dozen.
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "fused": config.fused or None,
    }
    if shared_by is not None:
        # imported late, because the import compiles TorchScript
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            list(groups.values()),
            torch.optim.AdamW,
            process_group=shared_by,
            parameters_as_bucket_view=True,  # one broadcast per rank instead of one per parameter
            **settings,
        )
    if config.name == "muon":
        return MuonAdamW(list(groups.values()), momentum=config.momentum, **settings)
    if config.name == "adamw8bit":
        return AdamW8bit(list(groups.values()), **settings)
    return torch.optim.AdamW(list(groups.values()), **settings)


def optimizer_state(optimizer: torch.optim.Optimizer) -> MutableMapping[Tensor, dict[str, Any]]:
    """The optimizer's mapping from parameters to the state that this rank holds; not a copy."""
    return _own_optimizer(optimizer).state


def state_keys(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """Names of the state tensors of a parameter, the mean gradient first."""
    for group in optimizer.param_groups:
        if (group.get("muon") or group.get("eight_bit")) and any(parameter is other for other in group["params"]):
            return ("momentum_buffer",) if group["muon"] else adamw8bit.STATE_KEYS
    return adamw_on_host.STATE_KEYS


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> Tensor:
    """A tensor of a parameter's state before its first update, as the optimizer would create it. `key`: name of the
    tensor."""
    if isinstance(optimizer, AdamWOnHost):
        return adamw_on_host.empty_state(parameter, key)
    if key == "step":  # AdamW's fused kernel counts steps on the device
        fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
    if key in adamw8bit.STATE_KEYS:
        return adamw8bit.empty_state(parameter.detach(), key)
    return torch.zeros_like(parameter.detach())


def updated_here(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """The parameters that this rank updates. These are all parameters, except under ZeRO-1."""
    return {parameter for group in _own_optimizer(optimizer).param_groups for parameter in group["params"]}


def _own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's parameters, which `ZeroRedundancyOptimizer` holds in `optim`."""
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return own
