from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from analyzers.spike import SpikeDetector, SpikePolicy, SpikeVerdict


def training_curve(
    seed: int, *, num_steps: int = 400, noise: float = 0.04, descent_steps: float = 60.0
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of an ordinary run: exponential descent, warm-up, noise with tails."""
    rng = np.random.default_rng(seed)
    step = np.arange(num_steps)
    loss = (1.6 + 4.0 * np.exp(-step / descent_steps)) * np.exp(noise * rng.standard_t(8, num_steps) / 1.15)
    grad_norm = (0.5 + 2.0 * np.exp(-step / 20) + (step < 30) * step / 30) * np.exp(0.15 * rng.standard_t(4, num_steps))
    return loss.tolist(), grad_norm.tolist()


def judge(losses: Iterable[float], grad_norms: Iterable[float]) -> list[SpikeVerdict]:
    detector = SpikeDetector()
    return [detector.observe(i + 1, x, g) for i, (x, g) in enumerate(zip(losses, grad_norms, strict=True))]


def spike_steps(verdicts: list[SpikeVerdict]) -> list[int]:
    return [verdict.step for verdict in verdicts if verdict.is_spike]


@pytest.mark.parametrize("noise", [0.002, 0.03, 0.08])
@pytest.mark.parametrize("descent_steps", [5.0, 60.0, 300.0])
def test_an_ordinary_run_is_silent(noise: float, descent_steps: float) -> None:
    for seed in range(25):
        curve = training_curve(seed, noise=noise, descent_steps=descent_steps)
        assert spike_steps(judge(*curve)) == [], (seed, noise, descent_steps)


@pytest.mark.parametrize(("loss_factor", "grad_factor"), [(2.0, 1.0), (1.6, 1.0), (1.6, 2.5), (1.3, 5.0)])
def test_a_spike_is_seen_at_its_step_and_only_there(loss_factor: float, grad_factor: float) -> None:
    for seed in range(40):
        loss, grad_norm = training_curve(seed, noise=0.03)
        where = 40 + seed * 9
        loss[where] *= loss_factor
        grad_norm[where] *= grad_factor
        assert spike_steps(judge(loss, grad_norm)) == [where + 1], seed


def test_a_high_loss_that_its_gradient_denies_is_told_when_it_lasts() -> None:
    for seed in range(40):
        loss, grad_norm = training_curve(seed, noise=0.03)
        where = 80 + seed * 5
        for step in (where, where + 1):
            loss[step] = 1.8 * float(np.median(loss[where - 9 : where]))
            grad_norm[step] = float(np.median(grad_norm[where - 9 : where]))
        assert where + 2 in spike_steps(judge(loss, grad_norm)), seed


def test_a_high_gradient_norm_alone_is_no_spike() -> None:
    loss, grad_norm = training_curve(0)
    grad_norm[200] *= 20
    assert spike_steps(judge(loss, grad_norm)) == []


def test_neither_nan_nor_a_spike_blinds_it() -> None:
    loss, grad_norm = training_curve(1, noise=0.02)
    for where in range(100, 140, 2):
        loss[where] = math.nan
        grad_norm[where] = math.inf
        loss[where + 1] *= 3
    verdicts = judge(loss, grad_norm)
    assert [verdicts[where].state for where in range(100, 140, 2)] == ["non_finite"] * 20
    assert spike_steps(verdicts) == list(range(102, 142, 2))


def test_a_divergence_stays_a_spike_until_it_is_the_new_normal() -> None:
    policy = SpikePolicy()
    loss, grad_norm = training_curve(2, noise=0.02)
    loss = [x if i < 200 else 3 * x for i, x in enumerate(loss)]
    assert spike_steps(judge(loss, grad_norm)) == list(range(201, 201 + policy.relearn_after))


def test_every_rank_says_the_same_and_a_restart_goes_on() -> None:
    loss, grad_norm = training_curve(3)
    loss[300] *= 2
    whole = judge(loss, grad_norm)
    first, second = SpikeDetector(), SpikeDetector()
    for i in range(250):
        first.observe(i + 1, loss[i], grad_norm[i])
    second.load_state_dict(first.state_dict())
    assert [second.observe(i + 1, loss[i], grad_norm[i]) for i in range(250, 400)] == whole[250:]


def test_a_spike_during_warm_up_is_not_judged() -> None:
    loss, grad_norm = training_curve(4)
    loss[5] *= 3
    verdicts = judge(loss, grad_norm)
    assert verdicts[5].state == "warm_up"
    assert spike_steps(verdicts) == []


@pytest.mark.parametrize("loss", [0.0, -3.0])
def test_a_loss_without_logarithm_is_left_alone(loss: float) -> None:
    assert {verdict.state for verdict in judge([loss] * 40, [1.0] * 40)} == {"ok"}


def test_without_a_gradient_norm_the_loss_decides() -> None:
    loss, _ = training_curve(5, noise=0.02)
    loss[150] *= 2
    assert spike_steps(judge(loss, [math.nan] * len(loss))) == [151]


def test_a_hard_batch_with_an_ordinary_gradient_is_no_spike() -> None:
    loss, grad_norm = training_curve(3, noise=0.01)
    where = 300
    level = float(np.median(loss[where - 9 : where]))
    for rise, gradient, is_spike in ((1.34, 1.0, False), (1.34, 1.6, True), (1.5, 1.0, True)):
        loss[where] = level * rise
        grad_norm[where] = gradient * float(np.median(grad_norm[where - 9 : where]))
        assert bool(spike_steps(judge(loss, grad_norm))) is is_spike, (rise, gradient)


def test_a_broken_update_in_a_noisy_young_run_is_told_by_its_gradient() -> None:
    """As recorded: 8 sequences of 64 tokens, a rate 100 times too high for one step; the loss rose by 30 %."""
    dice = np.random.default_rng(3)
    detector = SpikeDetector()
    for step in range(1, 39):
        verdict = detector.observe(step, (3.0 + 2.5 * math.exp(-step / 8)) * math.exp(dice.normal(0, 0.06)), 0.9)
        assert not verdict.is_spike
    ordinary = detector.observe(39, 4.08, 1.2)
    assert 2.5 < ordinary.loss_z < 8.0
    assert not ordinary.is_spike, "a hard batch"
    assert detector.observe(40, 4.08, 20.0).is_spike
