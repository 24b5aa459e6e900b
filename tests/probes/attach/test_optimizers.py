"""Optimizers of the user's own: wrappers, subclasses, and learning rates that are tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probes.attach.attach import attach, detach
from probes.tape.rundir import RunDir
from store import Store

STEPS = 3


class Wrapper(torch.optim.Optimizer):
    """Does not initialise its base class, as many a Lookahead does not."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast = fast
        self.param_groups = fast.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the fast weights."""
        return self.fast.step(closure)


class Clipping(torch.optim.SGD):
    """Clips in its step, which calls that of its base class."""

    def step(self, closure: Any = None) -> Any:
        """Clip, then step."""
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


class OnDevice(Tensor):
    """A number that nothing may wait for."""

    def __float__(self) -> float:
        raise AssertionError("waits for the device")


class TensorRate(torch.optim.SGD):
    """Its rate is a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["lr"] = torch.tensor(lr).as_subclass(OnDevice)

    def step(self, closure: Any = None) -> Any:
        """Leave the weights alone."""


def wrapped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Wrapper(torch.optim.SGD(parameters, lr=0.25))


def clipping(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    torch.optim.SGD(parameters, lr=0.1)  # from here on the `step` of the base class calls hooks, too
    return Clipping(parameters, lr=0.25)


def tensor_rate(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return TensorRate(parameters, lr=0.25)


@pytest.mark.parametrize("make", [wrapped, clipping, tensor_rate])
def test_each_step_has_its_rate_and_the_norm_before_the_optimizer_changes_gradients(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    parameters = list(model.parameters())
    optimizer = make(parameters)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    expected = []
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        norm = float(nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]))
        expected.append((0.25, pytest.approx(norm)))
        optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT lr, grad_norm FROM steps ORDER BY step") == expected
