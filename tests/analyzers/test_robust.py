from __future__ import annotations

import math

import numpy as np
import pytest

from analyzers.robust import complete, difference_sigma, median_or_nan, sigma


def test_spread_of_normal_values_is_their_standard_deviation_whatever_a_few_outliers_are() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, 20_000)
    values[:200] = 1e6
    assert median_or_nan(values) == pytest.approx(5.0, abs=0.1)
    assert sigma(values) == pytest.approx(2.0, rel=0.05)


def test_neighbour_noise_ignores_drift_and_steps_of_the_level() -> None:
    noise = np.random.default_rng(1).normal(0.0, 1.0, (3, 10_000))
    level = np.linspace(0.0, 50.0, 10_000) + np.where(np.arange(10_000) > 4_000, 30.0, 0.0)
    assert difference_sigma(noise + level) == pytest.approx(1.0, rel=0.05)
    assert sigma(noise + level) > 10


def test_empty_input_is_unknown() -> None:
    assert math.isnan(median_or_nan([]))
    assert math.isnan(sigma([]))
    assert math.isnan(difference_sigma([1.0]))


def test_a_missing_value_is_that_of_ranks_with_the_same_work_or_the_ranks_own() -> None:
    hole = np.nan
    values = np.array([[1, hole, 3], [1, 2, hole], [9, 8, 9], [7, hole, 7]], dtype=np.float32)
    filled = complete(values, [np.array([0, 1]), np.array([2]), np.array([3])])
    assert filled.tolist() == [[1, 2, 3], [1, 2, 3], [9, 8, 9], [7, 7, 7]]
    assert complete(values).tolist() == [[1, 5, 3], [1, 2, 7], [9, 8, 9], [7, 5, 7]]
    assert complete(np.full((2, 1), hole, dtype=np.float32)).tolist() == [[0], [0]]
