"""The phase of the loop's own name in which a slow rank loses its time, in the finding as a person reads it."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from probes.step_clock import GAPS
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import MS, plain_run
from tests.sentences import plain

RANKS, STEPS, FIRST_SLOW = 4, 100, 40


def run(*phases: tuple[str, int, int], slow_ms: int = 60) -> MemoryStore:
    """A run whose rank 1 is slow before forward; `phases`: name, time in all ranks, and how much more in rank 1."""
    store = plain_run(ranks=RANKS, steps=STEPS, step_ms=200.0)
    dice = np.random.default_rng(0)
    for gap in GAPS:
        store.connection.execute(f"UPDATE steps SET {gap}_ns = {40 * MS if gap == 'before_forward' else 0}")
    store.connection.execute(
        f"UPDATE steps SET before_forward_ns = {(40 + slow_ms) * MS} WHERE rank = 1 AND step >= {FIRST_SLOW}"
    )
    number = np.arange(1, STEPS + 1)
    for rank in range(RANKS):
        for name, usual_ms, more_ms in phases:
            took_ms = usual_ms + more_ms * ((number >= FIRST_SLOW) & (rank == 1)) + dice.uniform(0, 0.1, STEPS)
            store.add_columns(
                "spans", attempt=np.zeros(STEPS, np.int32), rank=np.full(STEPS, rank, np.int32), step=number,
                kind=np.full(STEPS, name), start_ns=number * 200 * MS,
                end_ns=number * 200 * MS + (took_ms * MS).astype(np.int64), wait_ns=np.zeros(STEPS, np.int64),
            )  # fmt: skip
    return store


def found(store: MemoryStore) -> Finding:
    (one,) = [finding for finding in stragglers(store, Scope()) if finding.status == "fired"]
    assert one.ranks == (1,)
    plain([one])
    return one


def test_the_phase_that_holds_the_excess_is_named() -> None:
    one = found(run(("generation", 30, 0), ("reward", 2, 60)))
    assert one.evidence["named_phase"] == "reward"
    assert "of compute per step in its phase reward" in one.summary


def test_of_nested_phases_the_inner_one_is_named() -> None:
    one = found(run(("rollout", 35, 60), ("generation", 30, 0), ("reward", 2, 58)))
    assert one.evidence["named_phase"] == "reward"


@pytest.mark.parametrize("phases", [(), (("generation", 30, 0),), (("generation", 30, 20), ("reward", 2, 20))])
def test_without_one_that_holds_it_the_gap_is_named(phases: tuple[tuple[str, int, int], ...]) -> None:
    one = found(run(*phases))
    assert "named_phase" not in one.evidence
    assert one.evidence["place"] == "before_forward"
    assert "before the forward pass" in one.summary
