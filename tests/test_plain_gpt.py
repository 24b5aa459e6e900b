"""The plain loop of `benchmarks.cost.plain_gpt` is the trainer's model and schedule, written once more."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.cost.plain_gpt import PlainLoop, configuration, summary
from trainer.layout.resolve import resolve
from trainer.training.build import build
from trainer.training.optimizer import learning_rate

OPTIONS = argparse.Namespace(dim=32, layers=2, heads=4, length=16, steps=40, batch=2, lr=1e-3)


def test_both_compute_the_same_from_the_same_weights() -> None:
    config = configuration(OPTIONS, seed=3)
    training = build(config, resolve(config, 1), torch.device("cpu"))
    plain = PlainLoop(config)
    plain.take_weights(dict(training.named_parameters()))
    tokens = training.stream.batch(0).inputs
    (part,) = training.parts
    with torch.no_grad():
        torch.testing.assert_close(plain.model(tokens), part.module(tokens), rtol=1e-5, atol=1e-5)


def test_both_have_the_same_rates() -> None:
    config = configuration(OPTIONS, seed=0)
    plain = PlainLoop(config)
    for step in range(40):
        plain.number = step
        assert plain.rate() == pytest.approx(learning_rate(step, config), rel=1e-9)


def test_figures_of_two_seeds() -> None:
    times = {
        "ours_s": [9.0, 1.0],
        "plain_s": [9.0, 1.0],
        "ours_cpu_s": [9.0, 2.0],
        "plain_cpu_s": [9.0, 1.0],
    }
    runs = [
        {"seed": 0, "ours": [5.0, 4.0], "plain": [5.0, 4.1], **times},
        {"seed": 1, "ours": [5.0, 4.4], "plain": [5.0, 4.3], **times},
    ]
    found = summary(runs)
    assert found["difference"] == pytest.approx(0.0)
    assert found["largest_difference"] == pytest.approx(0.1)
    assert found["first_difference_step"] == [2, 2]
    assert found["seed_noise"] == pytest.approx(0.2 / 2**0.5)
    assert found["ratio_low_high"] == pytest.approx([1.0, 1.0, 1.0])
    assert found["cpu_ratio_low_high"] == pytest.approx([0.5, 0.5, 0.5])
