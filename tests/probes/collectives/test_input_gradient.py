"""The gradient that reaches the first layer, before any reduction."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from probes.collectives.gradients.input_gradient import InputGradientNorms, on_input_gradient
from probes.collectives.gradients.reduction_inputs import watch_first_layer


class Poison(nn.Module):
    """Passes a batch on; the gradient on its way back becomes NaN while `is_on`."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            x.register_hook(lambda gradient: gradient * math.nan)
        return x


def model_of(poison: Poison) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), poison, nn.Linear(4, 1))


def step(model: nn.Module) -> None:
    model(torch.arange(6)).sum().backward()


def test_a_nan_of_the_backward_pass_reaches_the_first_layer() -> None:
    poison, norms = Poison(), InputGradientNorms()
    model = model_of(poison)
    undo = on_input_gradient(model, norms.add)
    step(model)
    clean = norms.take_largest()
    assert clean is not None
    assert 0 < clean.item() < math.inf
    for poison.is_on in (False, True, False):  # three microbatches, one of them bad
        step(model)
    bad = norms.take_largest()
    assert bad is not None
    assert math.isnan(bad.item())
    assert norms.take_largest() is None
    undo()
    step(model)
    assert norms.take_largest() is None


def test_a_frozen_first_layer_is_passed_over() -> None:
    poison, norms = Poison(), InputGradientNorms()
    model = model_of(poison)
    model[0].requires_grad_(False)
    on_input_gradient(model, norms.add)
    step(model)
    assert norms.take_largest() is not None


def test_a_model_on_the_host_is_left_to_the_wrapper_of_groups() -> None:
    model = model_of(Poison())
    norms = InputGradientNorms()
    norms.watch(model)
    step(model)
    assert norms.take_largest() is None


def test_a_finite_gradient_there_says_nothing_of_other_weights() -> None:
    poison = Poison()
    model = model_of(poison)
    inputs = watch_first_layer(model)
    inputs.begin(1)
    step(model)
    assert inputs.nonfinite(1) is None
    inputs.begin(2)
    poison.is_on = True
    step(model)
    assert inputs.nonfinite(2) is True
