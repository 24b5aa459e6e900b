"""Gradients by layer: blocks out of all proportion are named, ordinary spread and single odd steps are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.numerics.gradient_flow import gradient_flow, wrong_blocks
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain


def judged(store: MemoryStore, **scope: Any) -> list[Finding]:
    return plain(gradient_flow(store, Scope(**scope)))


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
    (finding,) = judged(sampled(factor, odd=range(60, 200)))
    assert (finding.kind, finding.status, finding.first_step, finding.last_step) == (kind, "fired", 60, 100)
    assert finding.evidence["blocks"] == ["blocks.2"]


def test_ordinary_spread_odd_steps_and_past_disproportion_give_no_finding() -> None:
    assert judged(sampled()) == []
    assert judged(sampled(1e-7, odd=range(90, 110))) == [], "two samples"
    assert judged(sampled(1e-7, odd=range(10, 90))) == [], "it came back"


def test_too_few_blocks_or_nothing_sampled_say_nothing() -> None:
    assert judged(MemoryStore()) == []
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": step, "parameter": f"blocks.{number}.w", "norm": 10.0 ** (-9 * number)}
        for step in range(10)
        for number in range(2)
    ]
    store.add("gradients", rows)
    assert judged(store) == []


def profile(norm_of: Callable[[int, int], float], *, blocks: int = 12, samples: int = 10) -> MemoryStore:
    """Norms by block and sample, with an embedding and a head that are as far off as they may be."""
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": 10 * sample, "parameter": name, "norm": norm}
        for sample in range(1, samples + 1)
        for name, norm in (
            [(f"blocks.{block}.mlp.weight", norm_of(block, sample)) for block in range(blocks)]
            + [("embed.weight", 1e-4), ("head.weight", 30.0)]
        )
    ]
    store.add("gradients", rows)
    return store


def named(*numbers: int) -> list[str]:
    return [f"blocks.{number}" for number in numbers]


@pytest.mark.parametrize(("ratio", "first_healthy"), [(10.0, 9), (5.0, 7), (3.0, 5)])
def test_a_decay_from_block_to_block_vanishes_at_the_input_and_explodes_nowhere(
    ratio: float, first_healthy: int
) -> None:
    (finding,) = judged(profile(lambda block, _: ratio ** (block - 11)))
    assert (finding.kind, finding.cause) == ("vanishing_gradients", "trend")
    assert finding.evidence["blocks"] == named(*range(first_healthy))
    assert finding.evidence["per_block_factor_ratio"] == pytest.approx(1 / ratio, abs=1e-3)


@pytest.mark.parametrize("ratio", [10.0, 3.0])
def test_a_growth_towards_the_input_explodes_there_and_vanishes_nowhere(ratio: float) -> None:
    (finding,) = judged(profile(lambda block, _: ratio ** (11 - block)))
    assert (finding.kind, finding.cause) == ("exploding_gradients", "trend")
    assert "blocks.0" in finding.evidence["blocks"]
    assert "blocks.11" not in finding.evidence["blocks"]


def test_an_odd_block_does_not_tilt_a_trend_and_is_told_beside_it() -> None:
    (vanishing, exploding) = judged(profile(lambda block, _: 10.0 ** (block - 11) * (1e8 if block == 5 else 1)))
    assert vanishing.evidence["per_block_factor_ratio"] == pytest.approx(0.1, abs=0.01)
    assert exploding.evidence["blocks"] == named(5)


@pytest.mark.parametrize("dead", [1, 6, 8, 11, 12])
def test_blocks_without_any_gradient_are_named_however_many(dead: int) -> None:
    (finding,) = judged(profile(lambda block, _: 0.0 if block < dead else 0.1))
    assert (finding.kind, finding.cause) == ("vanishing_gradients", "zero")
    assert finding.evidence["blocks"] == named(*range(dead))


@pytest.mark.parametrize("low", [3, 6, 8, 10])
def test_a_fall_in_one_place_vanishes_behind_it_wherever_it_is(low: int) -> None:
    (finding,) = judged(profile(lambda block, _: 1e-6 if block < low else 1.0))
    assert finding.kind == "vanishing_gradients"
    assert set(named(*range(low))) >= set(finding.evidence["blocks"])
    assert "blocks.0" in finding.evidence["blocks"]


@pytest.mark.parametrize("first_high", [7, 8])
def test_an_explosion_of_all_blocks_is_seen_against_the_run_s_own_past(first_high: int) -> None:
    (finding,) = judged(profile(lambda _, sample: 0.1 if sample < first_high else 3e5))
    assert (finding.kind, finding.cause, finding.first_step) == ("exploding_gradients", "whole", 10 * first_high)
    late = profile(lambda _, sample: 0.1 if sample < 150 else 3e5, samples=400)
    assert [found.cause for found in judged(late)] == ["whole"], "it stays told when it is long ago"


def test_ordinary_courses_are_silent() -> None:
    dice = random.Random(1)
    for blocks in (4, 12, 48, 96):
        depth = {block: (1 + block) ** -1.0 * 10 ** dice.uniform(-0.5, 0.5) for block in range(blocks)}
        assert judged(profile(lambda block, _, of=depth: of[block], blocks=blocks)) == []
    assert judged(profile(lambda block, sample: 0.1 if sample < 9 else 3e5)) == [], "two samples"
    assert judged(profile(lambda block, sample: 1e-5 if sample < 4 else 0.1)) == [], "the head had its gradient"
    assert judged(profile(lambda block, sample: 10.0 ** (2 - sample))) == [], "what is learnt needs no gradient"


def test_two_towers_are_two_chains() -> None:
    norms = {f"encoder.{n}": 1e-3 for n in range(6)} | {f"decoder.{n}": 1.0 for n in range(6)}
    assert wrong_blocks(norms) == {}
    norms |= {f"encoder.{n}": 10.0 ** (n - 8) for n in range(6)}
    assert {wrong.kind for wrong in wrong_blocks(norms).values()} == {"vanishing_gradients"}
