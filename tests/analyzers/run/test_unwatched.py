"""A watch that died or stood still beside ranks that trained on is reported; one of a short run or a pause is not."""

from __future__ import annotations

from collections.abc import Iterable

from analyzers.finding import Finding
from analyzers.run.analyze import unwatched_times
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import assert_plain

S = 10**9
TRAINED_S = range(400)
"""Seconds in which a step of a second begins."""


def found(watched_s: Iterable[int], *, trained_s: Iterable[int] = TRAINED_S, host: str = "a") -> list[Finding]:
    store = MemoryStore()
    store.add("ranks", [{"attempt": 0, "rank": 0, "wall_ns": 1, "world_size": 1, "host": host}])
    steps = [{"attempt": 0, "rank": 0, "step": at, "start_ns": at * S, "duration_ns": S} for at in trained_s]
    store.add("steps", steps)
    store.add("health", [{"sample_ns": at * S, "node": "a", "device": "host"} for at in watched_s])
    return unwatched_times(store, Scope())


def test_a_gap_with_steps_in_it_is_named() -> None:
    (finding,) = found([*range(100), *range(250, 400)])
    assert finding.status == "insufficient_data"
    assert "ranks on a from step 100 to 248 (149 s)" in finding.summary
    assert_plain(finding.summary)


def test_the_end_of_a_watch_is_named() -> None:
    (finding,) = found(range(100))
    assert "from step 100 to 399" in finding.summary


def test_readings_without_a_gap_give_no_finding() -> None:
    assert found(range(400)) == []
    assert found([*range(100), *range(150, 400)]) == [], "shorter than the limit"


def test_a_pause_of_the_ranks_is_no_gap() -> None:
    times = [*range(100), *range(300, 400)]
    assert found(times, trained_s=times) == []


def test_another_host_and_sparse_readings_give_no_finding() -> None:
    assert found(range(100), host="b") == []
    assert found(range(0, 400, 100)) == []
    assert found([]) == []
