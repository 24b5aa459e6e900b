"""The learning rate's shape, weight-decay groups, and the gradient norm of one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.trainer.layouts import tiny
from trainer.model.transformer import Transformer
from trainer.training.clipping import LocalGradients, clip_factor, gradient_norm, scale_gradients
from trainer.training.optimizer import build_optimizer, learning_rate
from trainer.training.precision import LossScaler


def rates(**optim: object) -> list[float]:
    config = tiny(train={"steps": 101}, optim={"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1, **optim})
    return [learning_rate(step, config) for step in range(101)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_rate_warms_up_and_falls(schedule: str) -> None:
    values = rates(schedule=schedule)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[10] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))


def test_shapes_differ_where_they_should() -> None:
    assert rates(schedule="cosine")[55] == pytest.approx(0.55)
    assert rates(schedule="linear")[55] == pytest.approx(0.55)
    assert rates(schedule="cosine")[30] > rates(schedule="linear")[30]
    assert rates(schedule="wsd", decay_ratio=0.2)[80] == 1.0
    assert rates(schedule="wsd", decay_ratio=0.2)[82] < 1.0
    assert set(rates(schedule="constant")[10:]) == {1.0}


def test_rate_scales_with_the_global_batch() -> None:
    assert rates(reference_batch_size=4)[10] == 2.0


def test_rate_beyond_the_last_step_stays_at_the_lowest() -> None:
    config = tiny(train={"steps": 10}, optim={"lr": 1.0, "warmup_steps": 0})
    assert learning_rate(50, config) == learning_rate(9, config) == pytest.approx(0.1)


def test_norms_and_the_embedding_do_not_decay() -> None:
    config = tiny()
    optimizer = build_optimizer([Transformer(config.model)], config.optim)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["names"]}
    assert {name for name, value in decay.items() if value == 0} == {
        name for name in decay if "norm" in name or name.startswith("embed")
    }
    assert decay["blocks.1.mlp.up.weight"] == decay["head.weight"] == 0.1


CPU = torch.device("cpu")


def gradients_of(*values: float) -> list[tuple[int, list[torch.Tensor]]]:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor([value, 0.0])
    return LocalGradients([*parameters, torch.nn.Parameter(torch.zeros(1))], ranks_per_stage=1).by_copies()


def test_clipping_scales_to_the_limit() -> None:
    gradients = gradients_of(3.0, 4.0)
    (norm,) = gradient_norm(gradients, CPU)
    assert norm.item() == 5.0
    scale_gradients(gradients, clip_factor(norm, 1.0))
    assert gradient_norm(gradients, CPU).item() == pytest.approx(1.0)
    scale_gradients(gradients, clip_factor(torch.tensor(0.5), 1.0))
    assert gradient_norm(gradients, CPU).item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_norm_that_is_not_finite_comes_back(value: float) -> None:
    gradients = gradients_of(1.0, value)
    (norm,) = gradient_norm(gradients, CPU)
    assert not math.isfinite(norm.item())
    assert clip_factor(norm, 0.5).item() == 1.0  # who is bad stays to be seen


def test_loss_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scaler = LossScaler(scale=4.0, growth_interval=2)
    assert not scaler.absorbs(1.0)
    assert scaler.absorbs(math.inf)
    assert scaler.absorbs(math.nan)
    assert scaler.scale == 1.0
    assert not scaler.absorbs(math.inf)  # no scale left to blame
    scaler.succeeded()
    scaler.succeeded()
    assert scaler.scale == 2.0
    other = LossScaler()
    other.load(scaler.state())
    assert other.scale == 2.0
