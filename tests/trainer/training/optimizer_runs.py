"""Steps of a training whose optimizer is under test, and the bits of all of its state.

training = trained(config, steps=2)
before = bits(training)
take(training, step=2)
assert_same(bits(training), before)         # AssertionError, by the name of the first tensor that differs
"""

from __future__ import annotations

import torch

from trainer.checkpoint.state import training_tensors
from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.training.build import build
from trainer.training.rank_training import Training

__all__ = ["CPU", "assert_same", "bits", "take", "trained"]

CPU = torch.device("cpu")


def trained(config: Config, steps: int) -> Training:
    training = build(config, resolve(config, 1), CPU)
    for step in range(steps):
        take(training, step)
    return training


def take(training: Training, step: int, leave_out: torch.Tensor | None = None) -> float:
    loss = training.forward_backward(training.batch(step))
    training.clip()
    training.step(step, leave_out=leave_out)
    return loss.item()


def bits(training: Training) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training_tensors(training).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
