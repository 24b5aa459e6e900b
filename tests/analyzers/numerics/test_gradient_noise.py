"""The noise scale of gradients: on a linear regression of which it is known, and what cannot be measured is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.numerics.gradient_noise import gradient_noise, noise_scale
from analyzers.scope import Scope
from analyzers.source import Floats
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain

DIMENSIONS, NOISE, ERROR = 20, 1.5, 0.4  # numbers of a sample, deviation of its label, |w - w*|
RANKS, ROWS, STEPS = 4, 32, 600
SIGMAS = 4.0


def judged(store: MemoryStore, **scope: Any) -> list[Finding]:
    return plain(gradient_noise(store, Scope(**scope)))


class Regression:
    """y = x w* + noise with x ~ N(0, I), at a w that is ERROR off: gradient of a sample x (x.d - noise), d = w - w*."""

    spread = ERROR**2 + NOISE**2
    square = ERROR**2  # |G|^2: G = d
    trace = DIMENSIONS * spread + ERROR**2  # S = spread I + d d^T
    trace_of_square = DIMENSIONS * spread**2 + 2 * spread * ERROR**2 + ERROR**4
    along = spread * ERROR**2 + ERROR**4  # G^T S G

    @classmethod
    def deviations(cls, steps: int) -> tuple[float, float]:
        """Standard errors of the means of both estimators over `steps`, for rank gradients that are nearly normal: the
        spread of RANKS of them, and their mean, are independent."""
        batch = RANKS * ROWS
        trace = 2 * cls.trace_of_square / (RANKS - 1)
        square = 4 * cls.along / batch + 2 * cls.trace_of_square / batch**2 + trace / batch**2
        return math.sqrt(trace / steps), math.sqrt(square / steps)

    @classmethod
    def norms(cls, steps: int, seed: int) -> tuple[Floats, Floats]:
        """(steps, RANKS) norms of the local gradients, (steps,) of their mean."""
        rng = np.random.default_rng(seed)
        d = np.full(DIMENSIONS, ERROR / math.sqrt(DIMENSIONS))
        x = rng.standard_normal((steps, RANKS, ROWS, DIMENSIONS))
        off = x @ d - NOISE * rng.standard_normal((steps, RANKS, ROWS))
        local = (x * off[..., None]).mean(axis=2)
        return np.linalg.norm(local, axis=2), np.linalg.norm(local.mean(axis=1), axis=1)


def stored(local: Floats, whole: Floats, *, tokens: int = ROWS, stages: int = 1) -> MemoryStore:
    """Local norms of (steps, data ranks); with stages each rank has an equal part of its data rank's square."""
    store = MemoryStore()
    rows = []
    for rank in range(local.shape[1] * stages):
        data, stage = rank % local.shape[1], rank // local.shape[1]
        place = {"attempt": 0, "rank": rank, "wall_ns": 1, "pp": stage, "dp_replicate": 0, "dp_shard": data}
        store.add("ranks", [place])
        rows += [
            {"attempt": 0, "rank": rank, "step": step, "start_ns": step, "tokens": tokens, "committed": True,
             "local_grad_norm": own / math.sqrt(stages), "grad_norm": whole[step]}
            for step, own in enumerate(local[:, data].tolist())
        ]  # fmt: skip
    store.add_columns("steps", **{name: np.array([row[name] for row in rows]) for name in rows[0]})
    return store


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_regression_has_the_noise_scale_that_follows_from_it(seed: int) -> None:
    (finding,) = judged(stored(*Regression.norms(STEPS, seed)))
    found, truth = finding.evidence, Regression.trace / Regression.square
    assert found["samples"] == STEPS // 3, "the newest third"
    of_trace, of_square = Regression.deviations(STEPS // 3)
    assert abs(found["trace_of_covariance"] - Regression.trace) < SIGMAS * of_trace
    assert abs(found["square_of_mean_gradient"] - Regression.square) < SIGMAS * of_square
    assert found["trace_standard_error"] == pytest.approx(of_trace, rel=0.3)
    assert found["square_standard_error"] == pytest.approx(of_square, rel=0.3)
    assert found["batch_tokens"] == RANKS * ROWS
    assert found["low_tokens"] < found["noise_scale_tokens"] < found["high_tokens"]
    relative = SIGMAS * math.hypot(of_trace / Regression.trace, of_square / Regression.square)
    assert found["noise_scale_tokens"] == pytest.approx(truth, rel=relative)


def test_the_interval_covers_the_truth_at_its_stated_rate() -> None:
    truth = Regression.trace / Regression.square
    hits = 0
    for seed in range(40):
        local, whole = Regression.norms(200, 100 + seed)
        noise = noise_scale((local**2).mean(axis=1), whole**2, ROWS, RANKS * ROWS)
        hits += noise.low_tokens <= truth <= noise.high_tokens
    assert hits >= 33  # 95 % of 40 is 38; fewer than 33 come with a probability of one in a thousand


def test_a_batch_far_from_the_scale_is_advised_upon() -> None:
    local, whole = Regression.norms(STEPS, 0)
    (near,) = judged(stored(local, whole))
    # The scale is about 300 samples. Had each sample a thousand tokens, the batch would be as it is: units cancel.
    (same,) = judged(stored(local, whole, tokens=1000 * ROWS))
    assert (near.status, same.status) == ("ok", "ok")
    assert "signal" in near.summary
    quiet = np.full((STEPS, RANKS), 1.0) + 1e-4 * np.random.default_rng(0).standard_normal((STEPS, RANKS))
    (smaller,) = judged(stored(quiet, np.full(STEPS, 0.995)))
    assert (smaller.status, smaller.cause) == ("advice", "smaller_batch")
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((200, RANKS, 2000)) + 0.1 / math.sqrt(2000)
    norms, mean = np.linalg.norm(vectors, axis=2), np.linalg.norm(vectors.mean(axis=1), axis=1)
    (larger,) = judged(stored(norms, mean))
    assert (larger.status, larger.cause) == ("advice", "larger_batch")
    assert "at least" in larger.summary


def test_stages_of_a_pipeline_are_one_data_rank() -> None:
    local, whole = Regression.norms(STEPS, 0)
    (one,), (two,) = judged(stored(local, whole)), judged(stored(local, whole, stages=2))
    assert two.evidence["noise_scale_tokens"] == pytest.approx(one.evidence["noise_scale_tokens"])
    assert two.evidence["data_ranks"] == RANKS


def test_a_step_that_ran_again_counts_once_and_a_refused_one_never() -> None:
    local, whole = Regression.norms(STEPS, 0)
    store = stored(local, whole)
    store.connection.execute(
        "INSERT INTO steps BY NAME SELECT * REPLACE (start_ns - 1000 AS start_ns, 1e6 AS local_grad_norm) FROM steps "
        "WHERE step BETWEEN 450 AND 500"
    )
    store.connection.execute(
        "INSERT INTO steps BY NAME SELECT * REPLACE (step + 1000 AS step, false AS committed, 1e6 AS local_grad_norm) "
        "FROM steps WHERE step BETWEEN 560 AND 570"
    )
    (finding,) = judged(store)
    assert finding.evidence == judged(stored(local, whole))[0].evidence


def test_missing_measurements_are_reported() -> None:
    local, whole = Regression.norms(STEPS, 0)
    (alone,) = judged(stored(local[:, :1], whole))
    assert alone.status == "insufficient_data"
    assert "one data rank" in alone.summary
    (few,) = judged(stored(local[:5], whole[:5]))
    assert (few.status, "5 steps have" in few.summary) == ("insufficient_data", True)
    even = np.full((STEPS, RANKS), 1.0) + 1e-4 * np.random.default_rng(0).standard_normal((STEPS, RANKS))
    (negative,) = judged(stored(even, np.full(STEPS, math.sqrt(1 / (1.02 * RANKS)))))
    assert (negative.status, "negative square" in negative.summary) == ("insufficient_data", True)
    store = stored(local, whole)
    store.connection.execute("UPDATE steps SET local_grad_norm = local_grad_norm / 4")
    (scaled,) = judged(store)
    assert (scaled.status, "scaled" in scaled.summary) == ("insufficient_data", True)
    store.connection.execute("UPDATE steps SET local_grad_norm = NULL")
    (unknown,) = judged(store)
    assert (unknown.status, "local_norm_interval" in unknown.summary) == ("insufficient_data", True)
    (empty,) = judged(MemoryStore())
    assert empty.status == "insufficient_data"
