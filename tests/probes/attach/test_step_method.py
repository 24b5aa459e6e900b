"""The method of an optimizer that is none of torch's, while it is watched and in copies."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from probes.attach.loop.step_method import around_step


class Sign:
    """An optimizer that only counts."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps


def test_a_copy_steps_by_itself_and_is_not_watched() -> None:
    optimizer, calls = Sign(), []
    undo = around_step(optimizer, lambda one: calls.append(("before", one)), lambda one: calls.append(("after", one)))
    assert optimizer.step(2) == 2
    assert calls == [("before", optimizer), ("after", optimizer)]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        assert copied.step() == 3
        assert optimizer.steps == 2
        assert len(calls) == 2
    undo()
    assert optimizer.step() == 3
    assert len(calls) == 2


class BareSign(torch.optim.Optimizer):
    """An optimizer that does not initialise its base class."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.defaults = {}
        self.param_groups = [{"params": parameters, "lr": 1.0}]

    def step(self, closure: object = None) -> float:
        return float(self.param_groups[0]["lr"])


@pytest.mark.parametrize("is_first", [False, True])
def test_a_scheduler_works_whether_it_is_made_first_or_last(is_first: bool) -> None:
    optimizer = BareSign([torch.ones(1)])
    calls: list[object] = []

    def scheduler() -> StepLR:
        return StepLR(optimizer, 1, gamma=0.5)

    def step() -> float:
        rate = optimizer.step()
        made.step()
        return rate

    earlier = scheduler() if is_first else None
    undo = around_step(optimizer, calls.append, lambda one: None)
    made = earlier or scheduler()
    with warnings.catch_warnings(action="error"):
        assert [step(), step()] == [1.0, 0.5]
        assert calls == [optimizer, optimizer]
        undo()
        assert step() == 0.25
    assert StepLR(optimizer, 1).optimizer is optimizer
