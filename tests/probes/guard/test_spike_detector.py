from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from probes.guard.spike_detector import SpikeDetector, SpikePolicy, SpikeVerdict
from tests.depth import tried


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
def test_an_ordinary_run_has_no_spike(noise: float, descent_steps: float) -> None:
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


def test_a_high_loss_with_a_normal_gradient_is_reported_when_it_lasts() -> None:
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


def test_nan_and_spikes_do_not_hide_later_spikes() -> None:
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


def test_a_restarted_detector_gives_the_same_verdicts() -> None:
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
def test_a_constant_loss_without_logarithm_is_no_spike(loss: float) -> None:
    assert [verdict.state for verdict in judge([loss] * 40, [1.0] * 40)] == ["warm_up"] * 16 + ["ok"] * 24


def signed_curve(seed: int, *, noise: float = 0.05, num_steps: int = 400) -> tuple[list[float], list[float]]:
    """A continuous likelihood: it falls from 3 through zero to -2."""
    rng = np.random.default_rng(seed)
    step = np.arange(num_steps)
    loss = -2.0 + 5.0 * np.exp(-step / 60) + noise * rng.standard_t(8, num_steps)
    return loss.tolist(), np.exp(0.15 * rng.standard_t(4, num_steps)).tolist()


@pytest.mark.parametrize("grad_norm", [0.0, math.nan, 20.0])
def test_a_jump_of_a_loss_below_zero_is_a_spike(grad_norm: float) -> None:
    for seed in range(10):
        loss, norms = signed_curve(seed)
        loss[300] = 50.0
        norms[300] = grad_norm or norms[300]
        verdicts = judge(loss, norms)
        assert spike_steps(verdicts) == [301], seed
        assert verdicts[300].is_signed
        assert verdicts[300].loss_level == pytest.approx(-2.0, abs=0.2)


def test_a_smaller_jump_below_zero_needs_its_gradient_or_a_second_step() -> None:
    for changed, grad_norm, found in (([300], 1.0, []), ([300], 8.0, [301]), ([300, 301], 1.0, [302])):
        loss, norms = signed_curve(1, noise=0.03)
        for i in changed:
            loss[i], norms[i] = 0.0, grad_norm
        assert spike_steps(judge(loss, norms)) == found


def test_a_clean_loss_on_its_way_through_zero_or_around_it_is_silent() -> None:
    for seed in range(tried(8, nightly=40)):
        rng = np.random.default_rng(seed)
        wander = np.zeros(2000)
        for i in range(1, 2000):
            wander[i] = 0.95 * wander[i - 1] + rng.standard_t(4)
        for loss in (rng.standard_t(4, 2000), wander, signed_curve(seed, noise=0.1)[0]):
            norms = np.exp(0.2 * rng.standard_t(4, len(loss)))
            assert spike_steps(judge([float(x) for x in loss], norms.tolist())) == [], seed


def test_a_lone_zero_changes_nothing_for_a_positive_loss() -> None:
    loss, norms = training_curve(6)
    loss[250], loss[300] = 0.0, 2 * loss[300]
    assert spike_steps(judge(loss, norms)) == [301]


def test_a_restart_below_zero_goes_on() -> None:
    loss, norms = signed_curve(3)
    loss[300] = 50.0
    whole = judge(loss, norms)
    first, second = SpikeDetector(), SpikeDetector()
    for i in range(250):
        first.observe(i + 1, loss[i], norms[i])
    second.load_state_dict(first.state_dict())
    assert [verdict.is_spike for verdict in whole[250:]] == [
        second.observe(i + 1, loss[i], norms[i]).is_spike for i in range(250, 400)
    ]


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


def test_a_broken_update_in_a_noisy_young_run_is_detected_by_its_gradient() -> None:
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


@pytest.mark.parametrize("left", [1.0, 1e-3])
def test_a_rise_of_what_little_is_left_of_the_loss_is_no_spike(left: float) -> None:
    """As recorded of a clean loop that knows its data by heart: +56 % of 0.005, after 4.2 at the start."""
    loss, grad_norm = training_curve(3, noise=0.03)
    loss = [4.2 * left ** min(1.0, i / 200) + left * value for i, value in enumerate(loss)]
    usual = float(np.median(loss[290:300]))
    for where, value in ((300, 1.56 * usual), (350, usual + 0.5)):
        loss[where] = value
        grad_norm[where] *= 7.0
    assert spike_steps(judge(loss, grad_norm)) == ([301, 351] if left == 1.0 else [351])
    detector = SpikeDetector()
    for i in range(250):
        detector.observe(i + 1, loss[i], grad_norm[i])
    again = SpikeDetector()
    again.load_state_dict(detector.state_dict())
    assert [again.observe(i + 1, loss[i], grad_norm[i]).is_spike for i in range(250, 301)][-1] is (left == 1.0)
