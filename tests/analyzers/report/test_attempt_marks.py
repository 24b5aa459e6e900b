"""Attempts and rollbacks on the timeline, and the names of its spans."""

from __future__ import annotations

import pytest

from analyzers.figures.time import activity, timeline
from analyzers.figures.time.attempt_marks import attempt_marks
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
STEP_MS = 100


def recorded() -> MemoryStore:
    """Two attempts of steps 1 to 3, the second a second later. The first one ends in a step that never ended."""
    store = MemoryStore()
    for attempt in range(2):
        for step in (1, 2, 3):
            is_open = (attempt, step) == (0, 3)
            start_ns = (4_000_000 + 1_000 * attempt + STEP_MS * step) * MS
            of = {"attempt": attempt, "rank": 0, "step": step, "start_ns": start_ns}
            store.add("steps", [of | {"duration_ns": None if is_open else STEP_MS * MS}])
            store.add("spans", [of | {"kind": "forward", "end_ns": start_ns + 95 * MS}])
            store.add("spans", [of | {"kind": "data", "end_ns": start_ns + MS}])
    return store


def marks_of(store: MemoryStore, attempt: int, first: int, last: int) -> dict[str, float]:
    """{text: milliseconds} of the marks that are drawn, each with a line."""
    pieces = activity.timeline(store, attempt=attempt, first_step=first, last_step=last, ranks=[0])
    figure = timeline.draw(pieces, attempt_marks(store, attempt), ranks=[0])
    found = {note.text: note.x for note in figure.layout.annotations if not note.text.startswith("step")}
    assert set(found.values()) <= {shape.x0 for shape in figure.layout.shapes}
    assert max(found.values(), default=0) <= figure.layout.xaxis.range[1]
    return found


def test_begin_and_end_of_an_attempt_are_marked_in_the_steps_that_hold_them() -> None:
    store = recorded()
    assert marks_of(store, 0, 1, 3) == {"attempt 0 begins": 0, "attempt 0 ends": pytest.approx(295)}
    assert marks_of(store, 0, 2, 2) == {}
    assert marks_of(store, 0, 3, 3) == {"attempt 0 ends": pytest.approx(95)}


def test_the_newest_attempt_has_an_end_once_the_run_has() -> None:
    store = recorded()
    assert marks_of(store, 1, 1, 3) == {"attempt 1 begins": 0}
    store.event("run_ended", wall_ns=4_002_000 * MS, reason="finished")
    assert marks_of(store, 1, 1, 3) == {"attempt 1 begins": 0, "attempt 1 ends": pytest.approx(300)}


def test_a_rollback_is_marked_where_it_happened_in_its_own_attempt() -> None:
    store = recorded()
    store.event("rollback", attempt=1, rank=0, step=2, wall_ns=4_001_290 * MS, from_step=2, to_step=1)
    assert marks_of(store, 1, 2, 3)["rollback: step 2 to 1"] == pytest.approx(90)
    assert "rollback: step 2 to 1" not in marks_of(store, 0, 1, 3)
    assert marks_of(store, 1, 3, 3) == {}


def test_spans_that_are_long_enough_carry_their_name() -> None:
    pieces = activity.timeline(recorded(), attempt=0, first_step=1, last_step=3, ranks=[0])
    texts = {trace.name: trace.text for trace in timeline.draw(pieces, ranks=[0]).data}
    assert texts == {"forward": ("forward",) * 3, "data": None}


def test_nothing_is_marked_where_nothing_is_recorded() -> None:
    store = MemoryStore()
    assert attempt_marks(store, 0) == []
    assert timeline.draw([], attempt_marks(recorded(), 0)).layout.annotations == ()
    store.drop("steps")
    assert attempt_marks(store, 0) == []
