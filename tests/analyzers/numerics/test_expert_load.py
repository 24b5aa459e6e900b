"""Use of experts: hot, unused and overfull ones are named, even use and single odd samples are not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.numerics.expert_load import expert_load
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain
from watch.exporting.metrics.run_samples import expert_samples

EXPERTS = 8


def judged(store: MemoryStore, **scope: Any) -> list[Finding]:
    return plain(expert_load(store, Scope(**scope)))


def routed(
    loads: Mapping[int, float] | None = None,
    *,
    layer: int = 3,
    odd: range = range(1000),
    steps: range = range(10, 210, 10),
    dropped: float = 0.0,
    ep: int = 1,
    tp: int = 1,
) -> MemoryStore:
    """Four layers of eight experts on four ranks; `loads`: by expert, relative to even, in one layer's odd steps."""
    dice = random.Random(0)
    rows: list[dict[str, Any]] = []
    for step in steps:
        for number in range(4):
            weights = [dice.uniform(0.7, 1.3) for _ in range(EXPERTS)]
            if number == layer and step in odd:
                weights = [(loads or {}).get(expert, weight) for expert, weight in enumerate(weights)]
            for rank in range(4):
                for expert, weight in enumerate(weights):
                    tokens = round(1000 * weight)
                    lost = round(tokens * dropped)
                    rows.append({"attempt": 0, "rank": rank, "step": step, "layer": number, "expert": expert,
                                 "tokens": tokens, "dropped": lost})  # fmt: skip
    store = MemoryStore()
    store.add("experts", rows)
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "ep": rank // tp % ep, "tp": rank % tp}
                        for rank in range(4)])  # fmt: skip
    return store


def only(store: MemoryStore) -> Finding:
    (finding,) = judged(store)
    assert (finding.kind, finding.status) == ("expert_imbalance", "fired")
    assert finding.advice == f"expert-imbalance-{finding.cause}"
    return finding


def test_even_use_is_silent() -> None:
    assert judged(routed()) == []
    assert judged(routed(dropped=0.04)) == []
    assert judged(MemoryStore()) == []


def test_a_model_with_experts_and_without_records_of_them_is_not_judged() -> None:
    (finding,) = judged(MemoryStore(), manifest={"config": {"model": {"num_experts": EXPERTS}}})
    assert (finding.kind, finding.status) == ("expert_imbalance", "insufficient_data")
    assert "no loads of experts were recorded" in finding.summary


def test_a_hot_expert_is_named_with_the_ranks_that_have_it() -> None:
    finding = only(routed({5: 8.0}, ep=2))
    assert (finding.cause, finding.ranks) == ("hot", (1, 3)), "experts 4 to 7 are on the second rank of each group"
    assert (finding.evidence["layer"], finding.evidence["expert"]) == (3, 5)
    assert finding.evidence["load_ratio"] == pytest.approx(8 * 8 / 15, rel=0.1)
    assert "Expert 5 of block 3 on ranks 1 and 3 gets 4." in finding.summary
    assert only(routed({5: 8.0})).ranks == (), "every rank has all experts"
    assert only(routed({5: 8.0}, ep=2, tp=2)).ranks == (2,), "two experts on each of four ranks"


def test_the_highest_load_depends_on_the_choices_of_a_token() -> None:
    """Of eight experts three choices a token leave at most 8 / 3 to one of them."""
    store = routed({5: 4.0})
    assert judged(store) == []
    (finding,) = judged(store, manifest={"config": {"model": {"experts_per_token": 3}}})
    assert (finding.cause, finding.evidence["expert"]) == ("hot", 5)
    assert finding.evidence["limit_ratio"] == pytest.approx(0.85 * 8 / 3, abs=0.001)


def test_a_few_hot_samples_are_not_a_hot_expert() -> None:
    assert judged(routed({5: 8.0}, odd=range(10, 60))) == []
    assert only(routed({5: 8.0}, odd=range(10, 130))).cause == "hot"


def test_an_unused_expert_is_named_once_for_all() -> None:
    finding = only(routed({2: 0.0, 6: 0.01}))
    assert (finding.cause, finding.evidence["expert"], finding.evidence["num_experts_dead"]) == ("dead", 2, 2)
    assert "1 more is unused." in finding.summary
    assert judged(routed({2: 0.0}, odd=range(10, 150))) == [], "it is used again"


def test_the_load_is_a_metric() -> None:
    found = {(s.name, s.labels.get("stat")): s.value for s in expert_samples(routed({5: 8.0, 2: 0.0}, dropped=0.25))}
    assert found["rankscope_expert_load_ratio", "min"] == 0
    assert found["rankscope_expert_load_ratio", "max"] == pytest.approx(8 * 8 / 14, rel=0.1)
    assert found["rankscope_expert_dropped_ratio", None] == pytest.approx(0.25, abs=0.001)


def test_many_dropped_tokens() -> None:
    finding = only(routed(dropped=0.25))
    assert finding.cause == "dropped"
    assert finding.evidence["dropped_ratio"] == pytest.approx(0.25, abs=0.001)
    assert finding.summary.startswith("25 % of the token-to-expert assignments were dropped")


def test_only_the_newest_attempt_and_window_count() -> None:
    store = routed({2: 0.0})
    even = {"attempt": 1, "rank": 0, "layer": 3, "tokens": 9, "dropped": 0}
    store.add("experts", [even | {"step": s, "expert": e} for s in range(300, 900, 30) for e in range(EXPERTS)])
    assert judged(store) == []
    (finding,) = judged(routed({2: 0.0}, steps=range(10, 30, 10)))
    assert finding.status == "insufficient_data"
    assert "fewer than 3 samples" in finding.summary
