"""How far a loss fell, against its own noise."""

from __future__ import annotations

import random

from analyzers.numerics.loss.learning import loss_fall


def test_a_falling_loss_falls_by_many_times_its_noise() -> None:
    rng = random.Random(1)
    losses = [5.5 * (step + 1) ** -0.2 + rng.gauss(0, 0.05) for step in range(200)]
    fall = loss_fall(losses)
    assert fall is not None
    assert 0.035 < fall.noise_nat < 0.065
    assert fall.drop_nat > 1.0
    assert fall.margin_ratio > 15


def test_noise_alone_is_no_fall() -> None:
    rng = random.Random(2)
    fall = loss_fall([4.0 + rng.gauss(0, 0.1) for _ in range(200)])
    assert fall is not None
    assert abs(fall.margin_ratio) < 1


def test_a_rising_loss_is_negative_and_a_constant_one_is_no_error() -> None:
    rising = loss_fall([1.0 + step for step in range(100)])
    assert rising is not None
    assert rising.drop_nat < 0
    constant = loss_fall([2.0] * 100)
    assert constant is not None
    assert constant.drop_nat == 0


def test_too_few_steps_are_not_judged() -> None:
    assert loss_fall([3.0] * 19) is None
