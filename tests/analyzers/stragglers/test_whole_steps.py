"""Steps of which only the duration is known: a slow rank is found, and ranks in lockstep are not called healthy."""

from __future__ import annotations

import random

import pytest

from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from store.readers.memory_store import MemoryStore


def steps(slow: float, *, lockstep: bool = False) -> MemoryStore:
    dice = random.Random(3)
    store = MemoryStore()
    rows = []
    for step in range(1, 120):
        took = [int(1e8 * dice.gauss(slow if rank == 2 else 1.0, 0.01)) for rank in range(4)]
        rows += [
            {"rank": rank, "step": step, "duration_ns": max(took) if lockstep else took[rank]} for rank in range(4)
        ]
    store.add("steps", rows)
    return store


@pytest.mark.parametrize("factor", [1.3, 1.6, 3.0])
def test_a_rank_with_longer_steps_is_slow(factor: float) -> None:
    with steps(factor) as store:
        (found,) = stragglers(store, Scope())
    assert (found.ranks, found.cause, found.status) == ((2,), "compute", "fired")
    assert found.evidence["factor_ratio"] == pytest.approx(factor, rel=0.03)
    assert found.evidence["step_without_it_ms"] == pytest.approx(100, rel=0.03)
    assert "place" not in found.evidence


def test_equal_steps_are_not_judged() -> None:
    with steps(1.6, lockstep=True) as store:
        (told,) = stragglers(store, Scope())
    assert told.status == "insufficient_data"
    assert "lockstep" in told.summary
