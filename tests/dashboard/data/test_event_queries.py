"""The newest events are on the page where there are more than it shows."""

from __future__ import annotations

from dashboard.data.sql.event_queries import MAX_EVENTS, events
from tests.analyzers.memory_store import MemoryStore


def test_the_oldest_are_left_out_and_counted() -> None:
    store = MemoryStore()
    rows = [{"attempt": 0, "rank": 0, "wall_ns": n, "step": n, "kind": "rollback"} for n in range(MAX_EVENTS + 20)]
    store.add("events", rows)
    found = events(store, ("rollback",), (), (), "")
    assert found["num"] == MAX_EVENTS + 20
    assert [row["step"] for row in found["rows"]] == [*range(MAX_EVENTS + 19, 19, -1)]
