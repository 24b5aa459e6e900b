"""The guard in a user's loop: what it refuses, where it goes back to, and when it gives up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from probes.attach.attach import attach, detach
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


def test_the_guard_gives_up_on_a_loop_that_always_fails() -> None:
    loop = Loop()
    loop.step()
    for _ in range(5):
        assert not loop.step(float("nan"))
    with pytest.raises(RunStopped, match="6 failures in a row"):
        loop.step(float("nan"))


@pytest.mark.parametrize("is_found_later", [False, True])
def test_without_given_parameters_it_takes_those_of_the_attached_model(
    is_found_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the probes off too, and if the model is found only when the loop calls it, as under `rankscope run`."""
    monkeypatch.setenv("RANKSCOPE_DISABLED", "1")
    model = nn.Linear(8, 1)
    try:
        attached = attach(() if is_found_later else model)
        loop_guard = guard(model.state_dict, model.load_state_dict)
        if is_found_later:
            attached.watch([model])
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        assert not loop_guard.refuses(loss)
        (loss.detach() * model(torch.full((2, 8), float("nan"))).mean()).backward()
        assert loop_guard.refuses(loss)
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        detach()


def test_a_step_without_gradients_is_judged_by_its_loss() -> None:
    loop = Loop()
    assert not loop.guard.refuses(1.0)
    assert loop.guard.refuses(float("nan"))


def test_a_guard_without_parameters_says_what_is_missing() -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(ValueError, match="pass parameters="):
        guard(model.state_dict, model.load_state_dict).refuses(1.0)
