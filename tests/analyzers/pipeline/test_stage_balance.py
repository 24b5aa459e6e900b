"""The bubble as a finding, and the stage that has too much to do: not a rank that is slow by itself."""

from __future__ import annotations

import pytest

from analyzers.pipeline.analyze import heaviest, pipeline
from analyzers.pipeline.policy import PipelinePolicy
from analyzers.scope import Scope
from tests.analyzers.account.test_bubble import MS, Span, gpipe
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore

GPIPE = Scope(manifest={"config": {"parallel": {"schedule": "gpipe"}}})

STAGES, MICROBATCHES = 4, 8


def pipelines(spans_of: dict[int, list[Span]]) -> MemoryStore:
    """A store of pipelines side by side: pipeline -> spans of ranks 0 to 3 of it."""
    store = MemoryStore()
    for number, spans in spans_of.items():
        own = [{"rank": number * STAGES + pp, "pp": pp, "dp_replicate": number} for pp in range(STAGES)]
        store.add("ranks", [{"attempt": 0, "wall_ns": 1} | row for row in own])
        names = ("step", "stage", "microbatch", "kind", "start_ns", "end_ns")
        store.add(
            "spans",
            [
                {"attempt": 0, "rank": number * STAGES + rank} | dict(zip(names, rest, strict=True))
                for rank, *rest in spans
            ],
        )
    return store


def steps(count: int, *, slow: int = -1, factor: int = 1, slow_from: int = 1) -> list[Span]:
    found: list[Span] = []
    for step in range(1, count + 1):
        is_slow = slow if step >= slow_from else -1
        found += gpipe(STAGES, MICROBATCHES, slow=is_slow, factor=factor, step=step, start=step * 1000 * MS)
    return found


def test_a_balanced_pipeline_is_measured_and_not_blamed() -> None:
    (bubble,) = explained(pipeline(pipelines({0: steps(20)}), GPIPE))
    assert (bubble.kind, bubble.status) == ("bubble", "ok")
    expected = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    assert bubble.evidence["idle_ratio"] == pytest.approx(expected, abs=1e-4)
    assert bubble.evidence["idle_expected_ratio"] == pytest.approx(expected, abs=1e-4)


def test_a_heavy_stage_is_named_with_all_its_ranks() -> None:
    store = pipelines({0: steps(20, slow=2, factor=2), 1: steps(20, slow=2, factor=2)})
    bubble, heavy = explained(pipeline(store, GPIPE))
    assert bubble.evidence["idle_ratio"] > bubble.evidence["idle_expected_ratio"] + 0.1
    assert (heavy.kind, heavy.status, heavy.ranks, heavy.cause) == ("stage_imbalance", "fired", (2, 6), "imbalance")
    assert heavy.evidence["work_factor_ratio"] == 2.0
    assert heavy.evidence["pipeline_speedup_ratio"] == pytest.approx(2 / 1.25)


def test_a_slow_rank_is_no_heavy_stage() -> None:
    """It is slow on one pipeline, or from some step on."""
    one_of_two = pipelines({0: steps(20, slow=2, factor=2), 1: steps(20)})
    from_step_11 = pipelines({0: steps(30, slow=2, factor=2, slow_from=16)})
    for store in (one_of_two, from_step_11):
        assert [finding.kind for finding in explained(pipeline(store, GPIPE))] == ["bubble"]


def test_too_little_is_said() -> None:
    (finding,) = explained(pipeline(pipelines({0: steps(8)}), Scope()))
    assert (finding.kind, finding.status) == ("bubble", "insufficient_data")
    assert explained(pipeline(MemoryStore(), Scope())) == []


def test_the_heaviest_must_be_the_same_everywhere() -> None:
    policy = PipelinePolicy()
    assert heaviest([[[1.0, 1.3, 1.0], [1.0, 1.3, 1.0]]], policy) == 1
    assert heaviest([[[1.0, 1.3, 1.0], [1.3, 1.0, 1.0]]], policy) is None
    assert heaviest([[[1.0, 1.1, 1.0], [1.0, 1.1, 1.0]]], policy) is None, "how layers divide"
