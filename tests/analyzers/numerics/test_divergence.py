"""Slow divergence: a climb without a step that stands out is found; noise, plateaus and jumps are not."""

from __future__ import annotations

import math
import random

import pytest

from analyzers.numerics.loss.divergence import divergence, find_rise
from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain


def curve(
    steps: int, *, climb_from: int = 0, rate: float = 0.0, noise: float = 0.03, seed: int = 0
) -> dict[int, float]:
    """A falling loss with noise; from a step on it climbs by `rate` a step."""
    dice = random.Random(seed)
    losses = {}
    for step in range(1, steps + 1):
        climb = rate * max(0, step - climb_from) if climb_from else 0.0
        losses[step] = (1.8 + 6.0 * (1 + step / 10) ** -0.5) * math.exp(climb + noise * dice.gauss(0, 1))
    return losses


@pytest.mark.parametrize("rate", [0.003, 0.005, 0.01])
def test_a_climb_is_found_within_two_hundred_steps(rate: float) -> None:
    for seed in range(10):
        rise = find_rise(curve(500, climb_from=250, rate=rate, seed=seed))
        assert rise is not None, seed
        assert 200 < rise.first_step <= 340, (seed, rise)
        assert rise.found_step <= 450, (seed, rise)
        assert rise.last_step == 500
        assert rise.high_loss > 1.3 * rise.low_loss


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.1])
def test_noise_on_a_falling_or_flat_loss_is_not_a_divergence(noise: float) -> None:
    for seed in range(20):
        assert find_rise(curve(1000, noise=noise, seed=seed)) is None, seed
        flat = {step: 2.0 * math.exp(noise * random.Random(1000 * seed + step).gauss(0, 1)) for step in range(1, 1001)}
        assert find_rise(flat) is None, seed


def signed(
    steps: int, *, climb_from: int = 0, rate: float = 0.0, noise: float = 0.2, seed: int = 0
) -> dict[int, float]:
    """A continuous likelihood that falls from 3 to -2, and from a step on climbs by `rate` a step."""
    dice = random.Random(seed)
    return {
        step: -2 + 5 * math.exp(-step / 60) + rate * max(0, step - (climb_from or steps)) + 0.2 * dice.gauss(0, 1)
        for step in range(1, steps + 1)
    }


def test_a_climb_of_a_loss_below_zero_is_found_and_told_without_a_share_of_it() -> None:
    for seed in range(5):
        rise = find_rise(signed(600, climb_from=300, rate=0.05, seed=seed))
        assert rise is not None, seed
        assert rise.low_loss == pytest.approx(-2.0, abs=0.2)
        assert rise.high_loss > 10
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": step, "start_ns": step, "loss": loss}
        for step, loss in signed(600, climb_from=300, rate=0.05).items()
    ]
    store.add("steps", rows)
    (finding,) = plain(divergence(store, Scope()))
    assert "%" not in finding.summary
    assert finding.evidence["loss_rise_ratio"] is None


def test_a_loss_through_zero_or_around_it_is_no_climb() -> None:
    for seed in range(20):
        assert find_rise(signed(1000, seed=seed)) is None, seed
        dice = random.Random(seed)
        level, wander = 0.0, {}
        for step in range(1, 2001):
            level = 0.97 * level + dice.gauss(0, 1)
            wander[step] = level
        assert find_rise(wander) is None, seed
        assert find_rise({step: dice.gauss(0, 1e-3) for step in range(1, 2001)}) is None, seed


def test_a_jump_that_stays_or_recovers_is_not_a_divergence() -> None:
    stays = {step: loss * (1.5 if step > 300 else 1.0) for step, loss in curve(500).items()}
    heals = {
        step: loss * (1 + 2 * math.exp(-(step - 300) / 15) if step > 300 else 1) for step, loss in curve(500).items()
    }
    assert find_rise(stays) is None
    assert find_rise(heals) is None


def test_too_few_steps_say_nothing() -> None:
    assert find_rise({}) is None
    assert find_rise(curve(60, climb_from=1, rate=0.01)) is None


def test_what_ran_again_counts_once_and_what_was_refused_does_not() -> None:
    """A refused step with a NaN, and steps that ran twice: the last time counts."""
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": step, "start_ns": step, "loss": loss, "committed": True}
        for step, loss in curve(500, climb_from=250, rate=0.005).items()
    ]
    store.add("steps", [row | {"loss": 99.0, "start_ns": row["start_ns"] - 1} for row in rows if row["step"] % 20 < 9])
    store.add("steps", [row | {"loss": math.nan, "committed": False, "start_ns": 10**6} for row in rows[:50]])
    store.add("steps", rows)
    (finding,) = plain(divergence(store, Scope()))
    assert (finding.kind, finding.status, finding.ranks) == ("divergence", "fired", ())
    assert finding.evidence["loss_highest"] < 10
    assert plain(divergence(MemoryStore(), Scope())) == []


def test_a_spike_already_reported_is_not_reported_as_divergence() -> None:
    store = MemoryStore()
    losses = curve(400, climb_from=250, rate=0.05, noise=0.01)
    store.add(
        "steps", [{"attempt": 0, "rank": 0, "step": s, "start_ns": s, "loss": loss} for s, loss in losses.items()]
    )
    assert find_rise(losses) is not None
    assert [finding.cause for finding in loss_spikes(store, Scope())] == ["divergence"]
    assert plain(divergence(store, Scope())) == []


def test_another_training_in_the_same_process_is_no_climb_of_the_first() -> None:
    """Ten short trainings in a row, each with more noise in its data and so a higher loss."""
    dice, store, num_steps = random.Random(5), MemoryStore(), 40
    rows = [
        {"attempt": 0, "rank": 0, "step": 1 + i, "loss": 1.0 + 0.1 * (i // num_steps) + dice.gauss(0, 0.02),
         "committed": True, "start_ns": i * 10**9, "duration_ns": 10**9}
        for i in range(10 * num_steps)
    ]  # fmt: skip
    store.add("steps", rows)
    assert [finding.kind for finding in divergence(store, Scope())] == ["divergence"]
    for number in range(1, 10):
        store.event("training_began", rank=0, step=1 + num_steps * number)
    assert divergence(store, Scope()) == []
