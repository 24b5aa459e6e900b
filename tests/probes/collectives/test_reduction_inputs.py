"""A rank's own gradient before FSDP2 reduces it: real FSDP2, over a process group that sends nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

from probes.collectives.gradients.reduction_inputs import ReductionInputs, watch_fsdp_reductions


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReductionInputs]:
    monkeypatch.setattr(fsdp, "foreach_reduce", vars(fsdp)["foreach_reduce"])  # put back at the end
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    watched = watch_fsdp_reductions()
    assert watched is not None
    yield watched
    dist.destroy_process_group()


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def backward(model: nn.Sequential, value: float | None = None) -> None:
    """One backward pass; `value` gets into the gradient of one weight, before it is reduced."""
    hooks = []
    if value is not None:

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad.view(-1)[3] = value
            return grad

        def before_forward(module: nn.Linear, inputs: object) -> None:  # after FSDP2's own: the weight is gathered
            hooks.append(module.weight.register_hook(spoil))

        handle = model[1].register_forward_pre_hook(before_forward)
        model(torch.randn(4, 8)).square().mean().backward()
        handle.remove()
    else:
        model(torch.randn(4, 8)).square().mean().backward()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("value", "is_bad"), [(None, False), (math.nan, True), (math.inf, True), (1e30, False)])
def test_a_value_that_is_not_finite_is_seen_before_the_reduction(
    inputs: ReductionInputs, value: float | None, is_bad: bool
) -> None:
    model = sharded()
    inputs.begin(7)
    backward(model, value)
    assert inputs.nonfinite(7) is is_bad
    assert inputs.nonfinite(8) is None


def test_a_step_is_known_while_the_next_one_is_computed_and_both_again(inputs: ReductionInputs) -> None:
    """The trainer judges a step late: what came once and not in the repetition still has its rank."""
    model = sharded()
    for step, value in ((40, math.nan), (41, None), (40, None), (41, None)):
        inputs.begin(step)
        backward(model, value)
    assert inputs.nonfinite(40) is True
    assert inputs.nonfinite(41) is False
    inputs.begin(42)
    assert inputs.nonfinite(40) is False, "only the repetition is kept"


def test_each_parameter_costs_one_norm_and_no_copy_of_its_gradient(inputs: ReductionInputs) -> None:
    model = sharded()
    inputs.begin(1)
    backward(model)
    ((_, kept),) = inputs._by_step
    assert [value.numel() for value in kept] == [1] * 6, "three layers with a weight and a bias"
