"""Trains a tiny model in one parallel layout and reports what it computed, for tests that compare layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.build import build
from trainer.config import Config
from trainer.mesh_plan import resolve

TINY: dict[str, dict[str, Any]] = {
    "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 128, "max_seq_len": 64},
    "data": {"seq_len": 32, "validation_ratio": 0.05},
    "train": {"steps": 20, "global_batch_size": 8, "device": "cpu"},
    "optim": {"lr": 3e-3, "warmup_steps": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Global loss and gradient norm of each step, and the full parameters at the end (of this rank's stages)."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def tiny(**sections: dict[str, Any]) -> Config:
    """The tiny configuration with some values replaced: `tiny(parallel={"tp": 2})`."""
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return Config.model_validate(merged)


def train(config: Config, world_size: int, steps: int) -> Outcome:
    """The first `steps` steps in this process, with whatever process group it is in."""
    training = build(config, resolve(config, world_size), torch.device("cpu"))
    losses, norms = [], []
    for step in range(steps):
        loss = training.forward_backward(training.batch(step))
        losses.append(training.global_mean(loss).item())
        norms.append(training.clip().item())
        training.step(step)
    parameters = {name: _full(parameter.detach()) for name, parameter in training.named_parameters()}
    return Outcome(losses=losses, norms=norms, parameters=parameters)


def train_layouts(rank: int, world_size: int, layouts: dict[str, dict[str, dict[str, Any]]], steps: int) -> Any:
    """Several layouts one after the other in the same processes; for `run_ranks`."""
    outcomes = {}
    for name, sections in layouts.items():
        outcomes[name] = train(tiny(**sections), world_size, steps)
        dist.barrier()
    return outcomes


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).clone()
