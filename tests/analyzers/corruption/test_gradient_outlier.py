"""Gradients of one rank that stand out: seen against its own past and the others, learned from only when healthy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analyzers.corruption.gradient_outlier import GradientOutlierDetector, corrupted_gradients
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain


def _steps(count: int, num_ranks: int = 4, *, noise: float = 0.1, seed: int = 0) -> np.ndarray:
    """Peaks that fall together, of ranks that are not alike (stages), with noise of their own."""
    random = np.random.default_rng(seed)
    common = np.exp(-np.arange(count) / 50)[:, None] * np.exp(0.3 * random.standard_normal((count, 1)))
    return common * (1 + np.arange(num_ranks)) * np.exp(noise * random.standard_normal((count, num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_a_rank_that_rises_alone_is_named(num_ranks: int) -> None:
    detector, peaks = GradientOutlierDetector(), _steps(30, num_ranks)
    assert [detector.observe(row.tolist()) for row in peaks[:-1]] == [None] * 29
    struck = peaks[-1].copy()
    struck[1] *= 20
    found = detector.observe(struck.tolist())
    assert found is not None
    assert found.rank == 1
    assert 8 < found.ratio < 40
    assert detector.observe(peaks[-1].tolist()) is None, "computed again it is as it must be"


def test_a_rise_on_all_ranks_names_no_rank() -> None:
    detector, peaks = GradientOutlierDetector(), _steps(30)
    peaks[20] *= 50
    assert [detector.observe(row.tolist()) for row in peaks] == [None] * 30


def test_few_healthy_steps_are_recomputed() -> None:
    """Tails as heavy as real gradients have at worst: each hit costs a step, and is not a finding."""
    detector, hits = GradientOutlierDetector(), 0
    for row in np.exp(0.3 * np.random.default_rng(1).standard_t(4, (5_000, 4))).tolist():
        if detector.observe(row) is not None:
            hits += 1
            detector.learn(row)
    assert hits <= 10


def test_no_false_alarm_in_twenty_thousand_noisy_steps() -> None:
    detector = GradientOutlierDetector()
    assert all(detector.observe(row) is None for row in np.exp(
        0.25 * np.random.default_rng(1).standard_normal((20_000, 4))).tolist())  # fmt: skip


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_unknown_and_nonfinite_gradients_are_not_judged(odd: float) -> None:
    detector = GradientOutlierDetector()
    for row in _steps(30).tolist():
        assert detector.observe([odd, *row[1:]]) is None


def test_only_an_outlier_that_a_recomputation_does_not_reproduce_is_a_finding() -> None:
    store = MemoryStore()
    assert plain(corrupted_gradients(store, Scope())) == []
    store.event("gradient_outlier", attempt=0, rank=0, step=20, outlier_rank=2, ratio=8.0, came_back=True)
    store.event(
        "gradient_outlier", attempt=0, rank=0, step=30, outlier_rank=2, ratio=8.0, came_back=False, device="h cuda:2"
    )
    (finding,) = plain(corrupted_gradients(store, Scope()))
    assert (finding.kind, finding.ranks, finding.first_step, finding.cause) == (
        "gradient_corrupted",
        (2,),
        30,
        "gradient",
    )
    assert "rank 2 were 8x too large" in finding.summary
