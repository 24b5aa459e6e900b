"""Gradients by layer: blocks out of all proportion are named, ordinary spread and single odd steps are not."""

from __future__ import annotations

import random

import pytest

from analyzers.gradient_flow import analyze
from tests.analyzers.memory_store import MemoryStore


def sampled(
    factor: float = 1.0, *, block: int = 2, steps: range = range(10, 110, 10), odd: range = range(0)
) -> MemoryStore:
    dice = random.Random(0)
    store = MemoryStore()
    rows = []
    for step in steps:
        for number in range(6):
            for name in ("mlp.up.weight", "attention.query.weight"):
                norm = 10 ** dice.uniform(-1, 1) * (factor if number == block and step in odd else 1.0)
                rows += [
                    {"attempt": 0, "rank": rank, "step": step, "parameter": f"blocks.{number}.{name}", "norm": norm}
                    for rank in range(2)
                ]
        rows.append({"attempt": 0, "rank": 0, "step": step, "parameter": "head.weight", "norm": 1e9})
    store.add("gradients", rows)
    return store


@pytest.mark.parametrize(
    ("factor", "kind"), [(0.0, "vanishing_gradients"), (1e-7, "vanishing_gradients"), (1e7, "exploding_gradients")]
)
def test_a_block_out_of_proportion_is_named(factor: float, kind: str) -> None:
    (finding,) = analyze(sampled(factor, odd=range(60, 200)))
    assert (finding.kind, finding.status, finding.first_step, finding.last_step) == (kind, "fired", 60, 100)
    assert finding.evidence["blocks"] == ["blocks.2"]


def test_spread_odd_steps_and_what_is_over_are_silent() -> None:
    assert analyze(sampled()) == []
    assert analyze(sampled(1e-7, odd=range(90, 110))) == [], "two samples"
    assert analyze(sampled(1e-7, odd=range(10, 90))) == [], "it came back"


def test_too_few_blocks_or_nothing_sampled_say_nothing() -> None:
    assert analyze(MemoryStore()) == []
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": step, "parameter": f"blocks.{number}.w", "norm": 10.0 ** (-9 * number)}
        for step in range(10)
        for number in range(2)
    ]
    store.add("gradients", rows)
    assert analyze(store) == []
