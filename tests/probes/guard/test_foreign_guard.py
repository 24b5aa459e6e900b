"""The guard in somebody else's loop: what it refuses, where it goes back to, and when it gives up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from probes.guard.attached_loop import LoopGuard, RunStopped, guard


class Loop:
    """A loop of the usual kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.guard: LoopGuard = guard(self.state, self.load, parameters=self.model.parameters(), interval=5)
        self.generator = torch.Generator().manual_seed(1)
        self.history: list[Any] = [self.snapshot()]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.state())

    def step(self, scale: float = 1.0) -> bool:
        x = torch.randn(16, 8, generator=self.generator)
        loss = ((self.model(x) - x.sum(dim=1, keepdim=True)) * scale).square().mean()
        loss.backward()
        if self.guard.refuses(loss):
            return False
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(self.snapshot())
        return True


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_a_nan_brings_back_the_last_good_state() -> None:
    loop = Loop()
    assert all(loop.step() for _ in range(12))
    assert not loop.step(float("nan"))
    assert same(loop.state(), loop.history[5])  # that of 10 has been followed by two healthy steps only
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert loop.guard.last is not None
    assert loop.guard.last.kind == "non_finite"


def test_training_goes_on_and_does_not_change_what_is_kept() -> None:
    loop = Loop()
    for _ in range(9):
        loop.step()
    assert not loop.step(float("inf"))
    kept = copy.deepcopy(loop.history[5])
    assert loop.step()
    assert not loop.step(float("nan"))
    assert same(loop.state(), kept)


def test_a_jump_of_the_loss_is_refused() -> None:
    loop = Loop()
    for _ in range(40):
        assert loop.step()
    assert not loop.step(1000.0)
    assert loop.guard.last is not None
    assert loop.guard.last.kind == "spike"


def test_it_gives_up_on_a_loop_that_always_fails() -> None:
    loop = Loop()
    loop.step()
    for _ in range(5):
        assert not loop.step(float("nan"))
    with pytest.raises(RunStopped, match="6 failures in a row"):
        loop.step(float("nan"))
