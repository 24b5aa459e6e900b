"""Trains a tiny model in one parallel layout and reports what it computed, for tests that compare layouts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.training.build import build

TINY: dict[str, dict[str, Any]] = {
    "model": {"dim": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "hidden_dim": 128, "max_seq_len": 64},
    # Half a megabyte of real text; the default, the whole standard library, is read and hashed for each training.
    "data": {"path": [str(Path(asyncio.__file__).parent)], "seq_len": 32, "validation_ratio": 0.05},
    "train": {"steps": 20, "global_batch_size": 8, "device": "cpu"},
    "optim": {"lr": 3e-3, "warmup_steps": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Global loss and gradient norm of each step, and the full parameters at the end (those this rank has)."""

    losses: list[float]
    norms: list[float]
    validation_loss: float  # taken between two steps, halfway
    parameters: dict[str, torch.Tensor]


def tiny(**sections: dict[str, Any]) -> Config:
    """The tiny configuration with some values replaced: `tiny(parallel={"tp": 2})`."""
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return Config.model_validate(merged)


def train(config: Config, world_size: int, steps: int) -> Outcome:
    """The first `steps` steps in this process, with whatever process group it is in."""
    training = build(config, resolve(config, world_size), torch.device("cpu"))
    losses, norms = [], []
    validation_loss = float("nan")
    for step in range(steps):
        if step == steps // 2:
            validation_loss = training.evaluate_sets(2)[""].item()
        overflowed = True
        while overflowed:  # fp16: the same batch again with a lower scale, so that all layouts take the same steps
            loss = training.global_mean(training.forward_backward(training.batch(step))).item()
            norm = training.clip()[0]
            overflowed = training.absorb_overflow(norm)
        losses.append(loss)
        norms.append(norm)
        training.step(step)
    parameters = {name: _full(parameter.detach()) for name, parameter in training.named_parameters()}
    return Outcome(losses=losses, norms=norms, validation_loss=validation_loss, parameters=parameters)


def train_alone(config: Config, steps: int) -> Outcome:
    """The same in one process, with one thread: what layouts are compared with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(config, 1, steps)
    finally:
        torch.set_num_threads(threads)


def train_layouts(rank: int, world_size: int, layouts: dict[str, dict[str, dict[str, Any]]], steps: int) -> Any:
    """Several layouts one after the other in the same processes; for `run_ranks`."""
    outcomes = {}
    for name, sections in layouts.items():
        outcomes[name] = train(tiny(**sections), world_size, steps)
        dist.barrier()
    return outcomes


def compare(single: Outcome, by_rank: list[Outcome], *, loss: float, parameter: float) -> None:
    """Assert that all ranks together did what the single process did; `loss` relative, `parameter` absolute."""
    parameters: dict[str, torch.Tensor] = {}
    for outcome in by_rank:
        assert outcome.losses == pytest.approx(single.losses, rel=loss)
        assert outcome.validation_loss == pytest.approx(single.validation_loss, rel=loss)
        assert outcome.norms == pytest.approx(single.norms, rel=10 * loss)
        # What recovery decides from must be the same number everywhere, to the last bit.
        assert outcome.losses == by_rank[0].losses
        assert outcome.norms == by_rank[0].norms
        parameters |= outcome.parameters
    assert parameters.keys() == single.parameters.keys()
    for name, value in single.parameters.items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=parameter, msg=lambda m, n=name: f"{n}: {m}")


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).clone()
