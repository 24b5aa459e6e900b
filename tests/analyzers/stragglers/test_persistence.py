"""Segments in which a rank is slow: their begin and end."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.account.timings import Matrix
from analyzers.robust import others_median
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from analyzers.stragglers.comparison.persistence import find_segments
from tests.analyzers.rank_timings import Slow, simulate
from tests.depth import tried

FIRST_SLOW = 30


@pytest.mark.parametrize("disturbed_first", [None, 15, 18, 20])
@pytest.mark.parametrize("seed", range(tried(1, nightly=3)))
def test_the_begin_is_that_of_the_slowness_and_not_of_a_disturbance_before(
    disturbed_first: int | None, seed: int
) -> None:
    """Five observations taken by another job of the machine, then calm ones, then a rank that is slow for good."""
    excess: Matrix = np.random.default_rng(seed).normal(0, 0.02, (4, 110)).astype(np.float32)
    excess[3, FIRST_SLOW:] += 2.0
    if disturbed_first is not None:
        excess[3, disturbed_first : disturbed_first + 5] += 1.5
    (segment,) = find_segments(excess)
    assert (segment.row, segment.begin, segment.end) == (3, FIRST_SLOW, 110)


@pytest.mark.parametrize("seed", range(tried(1, nightly=3)))
def test_the_end_is_that_of_the_slowness_and_not_of_a_small_excess_after(seed: int) -> None:
    """Half as slow again for 40 observations, then 3 % for 20, which is above the noise of eight quiet ranks."""
    excess: Matrix = np.random.default_rng(seed).normal(0, 0.002, (8, 120)).astype(np.float32)
    excess[1, 40:80] += 0.5
    excess[1, 80:100] += 0.03
    (segment,) = find_segments(excess)
    assert (segment.row, segment.begin, segment.end) == (1, 40, 80)


@pytest.mark.parametrize("seed", range(tried(5, nightly=10)))
def test_a_slow_rank_of_three_lowers_the_excess_of_both_peers(seed: int) -> None:
    """For 41 steps. Each peer's excess is a tenth below zero, as it is compared with the slow rank, too."""
    timings = simulate(seed, ranks=3, steps=140, machine="busy", faults=[Slow(rank=1, step=60, until=100, factor=1.25)])
    (found,) = find_stragglers(timings)
    assert (found.rank, found.ongoing) == (1, False)
    assert abs(found.first_step - 60) <= 2
    assert abs(found.last_step - 100) <= 2


def test_of_three_ranks_that_all_differ_none_is_slow() -> None:
    times = np.array([1.0, 1.2, 0.8])[:, None] * np.random.default_rng(0).normal(1, 0.01, (3, 120))
    assert find_segments((times / others_median(times) - 1).astype(np.float32)) == []


@pytest.mark.parametrize("seed", range(tried(1, nightly=3)))
def test_a_slowdown_that_becomes_smaller_lasts(seed: int) -> None:
    excess: Matrix = np.random.default_rng(seed).normal(0, 0.02, (4, 150)).astype(np.float32)
    excess[3, 50:110] += 0.5
    excess[3, 110:] += 0.2
    (segment,) = find_segments(excess)
    assert (segment.row, segment.begin, segment.end, segment.ongoing) == (3, 50, 150, True)
