"""Padding is reported from its share on, and only where a mask was seen."""

from __future__ import annotations

import pytest

from analyzers.data.analyze import padding
from analyzers.scope import Scope
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore


def run(padded: list[float], *, tokens: int = 1000) -> MemoryStore:
    """Steps of one rank with so many padded tokens; 0 is not written, as by the probe."""
    store = MemoryStore()
    place = {"attempt": 0, "rank": 0}
    store.add("steps", [place | {"step": step, "tokens": tokens} for step in range(len(padded))])
    store.add(
        "scalars",
        [place | {"step": step, "name": "padded_tokens", "value": n} for step, n in enumerate(padded) if n],
    )
    return store


def test_a_third_of_padding_is_reported_with_its_share() -> None:
    (found,) = explained(padding(run([300.0, 500.0] * 20), Scope()))
    assert (found.kind, found.severity, found.first_step, found.last_step) == ("padding", "warning", 0, 39)
    assert found.evidence == {"padded_ratio": 0.4, "padded_tokens": 16_000, "tokens": 40_000}
    assert "40 % of the tokens" in found.summary


@pytest.mark.parametrize(
    "padded",
    [[0.0] * 40, [200.0] * 40, [900.0] * 5, [900.0, 0.0, 0.0, 0.0] * 10],
    ids=["no mask", "random lengths", "few steps", "one batch in four"],
)
def test_little_padding_is_not_reported(padded: list[float]) -> None:
    assert padding(run(padded), Scope()) == []
