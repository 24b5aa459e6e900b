"""Small lasting slowdowns: found soon, in noise of several kinds, and silence where nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.account.timings import Matrix
from analyzers.robust import others_median
from analyzers.stragglers.comparison.change_point import find_changes
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from analyzers.stragglers.policy import ChangePolicy
from tests.analyzers.rank_timings import Slow, simulate


def made(
    seed: int, *, ranks: int = 8, steps: int = 200, noise: float = 0.008, spread: float = 0.003, wander: float = 0.0
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Own times in ms: lasting differences, white noise, and with `wander` a disturbance that lasts some 20 steps."""
    rng = np.random.default_rng(seed)
    logs = np.log(100.0) + spread * rng.standard_normal((ranks, 1)) + noise * rng.standard_normal((ranks, steps))
    if wander:
        logs += wander * np.repeat(rng.standard_normal((ranks, steps // 20 + 1)), 20, axis=1)[:, :steps]
    logs += 0.01 * rng.standard_normal((1, steps))  # what all share
    return np.exp(logs)


def changes(own: npt.NDArray[Any]) -> list[tuple[int, int]]:
    own_ms = own.astype(np.float32)
    baseline = others_median(own_ms)
    excess: Matrix = (own_ms - baseline) / baseline
    return [(segment.row, segment.begin) for segment in find_changes(excess, own_ms, own_ms)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])
def test_two_percent_within_a_hundred_steps_in_any_group(ranks: int) -> None:
    hits = 0
    for seed in range(20):
        own = made(seed, ranks=ranks, steps=150)
        own[seed % ranks, 50:] *= 1.02
        for row, begin in changes(own):
            assert row == seed % ranks
            assert abs(begin - 50) <= 12
            hits += 1
    assert hits >= (19 if ranks > 3 else 17)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_five_percent_within_ten_steps(ranks: int) -> None:
    hits = 0
    for seed in range(20):
        own = made(seed, ranks=ranks, steps=50)
        own[seed % ranks, 40:] *= 1.05
        found = [row for row, _ in changes(own)]
        assert found in ([], [seed % ranks])
        hits += bool(found)
    assert hits >= (19 if ranks > 2 else 18)


@pytest.mark.parametrize(("ranks", "wander"), [(2, 0.0), (4, 0.0), (8, 0.0), (2, 0.005), (4, 0.01), (8, 0.02)])
def test_noise_without_a_change_gives_no_finding(ranks: int, wander: float) -> None:
    alarms = sum(len(changes(made(seed, ranks=ranks, noise=0.02, spread=0.01, wander=wander))) for seed in range(150))
    assert alarms == 0


@pytest.mark.parametrize("onset", [38, 60, 89, 92, 95, 98])
def test_the_onset_of_a_large_change_is_its_first_step_wherever_it_is(onset: int) -> None:
    """For onsets before and after step 100 noise is measured over windows of different lengths."""
    own = simulate(1, ranks=4, steps=120, machine="busy", faults=[Slow(rank=1, step=1 + onset, factor=1.5)]).compute
    ((row, begin),) = changes(own)
    assert row == 1
    assert abs(begin - onset) <= 1


def test_a_rank_that_gets_faster_does_not_accuse_its_peer() -> None:
    for seed in range(20):
        own = made(seed, ranks=2)
        own[0, 100:] /= 1.05
        assert changes(own) == []


def test_pauses_are_no_change() -> None:
    for seed in range(20):
        own = made(seed)
        own[2, 170::3] *= 1.5  # every third step at the end
        assert all(row == 2 for row, _ in changes(own))
        own = made(seed)
        own[2, [100, 140, 180]] *= 5
        assert changes(own) == []


def test_a_slowdown_that_is_over_is_left_to_persistence() -> None:
    own = made(1)
    own[3, 60:120] *= 1.03
    assert changes(own) == []


def test_a_long_history_is_looked_at_in_groups() -> None:
    own = made(3, steps=21_003)
    own[5, 15_000:] *= 1.02
    ((row, begin),) = changes(own)
    assert row == 5
    assert abs(begin - 15_000) <= 60


@given(st.integers(2, 9), st.integers(0, 80), st.integers(0, 2**32 - 1), st.floats(0, 1e9))
def test_changes_lie_within_the_matrix_for_any_numbers(ranks: int, steps: int, seed: int, size: float) -> None:
    own = (np.random.default_rng(seed).standard_cauchy((ranks, steps)) * size).astype(np.float32)
    for segment in find_changes(own, own, own, ChangePolicy()):
        assert 0 <= segment.row < ranks
        assert 0 <= segment.begin < segment.end == steps


def test_a_small_slowdown_is_found_by_the_straggler_analyzer() -> None:
    for seed in range(10):
        (found,) = find_stragglers(simulate(seed, ranks=4, steps=200, faults=[Slow(rank=1, step=120, factor=1.025)]))
        assert (found.rank, found.cause, found.ongoing) == (1, "compute", True)
        assert abs(found.first_step - 120) <= 5
