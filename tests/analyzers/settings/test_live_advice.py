from __future__ import annotations

from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.settings.live_advice import AdviceState, live_advice, remembered_advice
from tests.analyzers.bucketed_world import bucketed_world
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import plain_run

SLOW: dict[str, Any] = {"config": {}, "planned": {"rank": 0, "step_s": 0.04}}
NOW_NS = 2 * 10**15
FIRST, SECOND = AdviceState().policy.at_steps[:2]


def said(store: MemoryStore, state: AdviceState, manifest: dict[str, Any], *, is_last: bool = False) -> list[Finding]:
    advice = live_advice(store, state, lambda: manifest, NOW_NS, is_last=is_last)
    assert state.errors == {}
    return advice


def test_a_step_longer_than_planned_is_reported_once_when_it_is_known() -> None:
    state = AdviceState()
    assert said(plain_run(steps=FIRST - 1), state, SLOW) == []
    (advice,) = said(plain_run(steps=FIRST), state, SLOW)
    assert (advice.kind, advice.cause, advice.status) == ("configuration", "plan", "advice")
    assert advice.summary == "The run differs from its plan: time of a step 0.1 s instead of 0.04 s (+150 %)."
    assert said(plain_run(steps=FIRST + 1), state, SLOW) == []
    assert said(plain_run(steps=SECOND), state, SLOW) == []


def test_a_run_as_planned_gets_no_advice() -> None:
    assert said(plain_run(), AdviceState(), SLOW | {"planned": {"rank": 0, "step_s": 0.09}}) == []


def test_advice_that_needs_more_steps_comes_later() -> None:
    state = AdviceState()
    said(plain_run(steps=FIRST), state, SLOW)
    later = plain_run(steps=SECOND)
    later.connection.execute("UPDATE steps SET data_ns = 30000000")
    in_process = SLOW | {"config": {"data": {"num_workers": 0}}}
    assert [advice.cause for advice in said(later, state, in_process)] == ["workers"]


def test_a_run_that_ends_between_two_looks_is_judged_as_it_ends() -> None:
    assert said(plain_run(steps=FIRST - 1), AdviceState(), SLOW, is_last=True) == []
    state = AdviceState()
    said(plain_run(steps=FIRST), state, {})
    assert said(plain_run(steps=FIRST + 9), state, SLOW) == []
    assert [advice.cause for advice in said(plain_run(steps=FIRST + 9), state, SLOW, is_last=True)] == ["plan"]


@pytest.mark.parametrize(
    ("planned", "words"), [(None, "of the step time from step"), (0.05, "time (planned: 5 %) from step")]
)
def test_exposed_communication_is_reported_beside_the_plan(planned: float | None, words: str) -> None:
    store = bucketed_world(buckets=1, bucket_bytes=16_000_000, gb_per_s=0.5, latency_ms=0.0)
    manifest = {} if planned is None else {"planned": {"communication_ratio": planned}}
    (advice,) = said(store, AdviceState(), manifest)
    assert (advice.kind, advice.status) == ("exposed_communication", "advice")
    assert words in advice.summary


def test_another_watch_of_the_launch_repeats_nothing_and_a_new_launch_does() -> None:
    told = {"kind": "advice", "finding_kind": "configuration", "cause": "plan"}
    before = [{"kind": "run_started"}, told, {"kind": "watch_started"}]
    assert said(plain_run(), AdviceState(reported=remembered_advice(before)), SLOW) == []
    resumed = [*before, {"kind": "run_started"}]
    assert len(said(plain_run(), AdviceState(reported=remembered_advice(resumed)), SLOW)) == 1
