"""Each execution of a step is handed over once, whatever comes into the store first."""

from __future__ import annotations

from tests.analyzers.memory_store import MemoryStore
from watch.exporting.trackers.tracked_steps import TrackedSteps

STEP_NS = 1_000_000
LATER_NS = 1_000
"""By which rank 0 begins each step after rank 1."""
TRAINED = [1, 2, 3, 2, 3, 4]
"""With a rollback after the third."""


def add(store: MemoryStore, rank: int, first: int, last: int) -> None:
    """The executions of a rank from `first` up to `last`."""
    store.add(
        "steps",
        [
            {
                "attempt": 0,
                "rank": rank,
                "step": step,
                "start_ns": (i + 1) * STEP_NS + (LATER_NS if rank == 0 else 0),
                "duration_ns": STEP_NS // 2,
                "loss": 2.0,
            }
            for i, step in enumerate(TRAINED)
            if first <= i < last
        ],
    )


def test_a_lower_rank_that_comes_later_repeats_nothing() -> None:
    store = MemoryStore()
    add(store, 1, 0, 4)
    cursor = TrackedSteps()
    taken = [step.step for step in cursor.take(store)]
    assert taken == TRAINED[:4]
    add(store, 0, 0, len(TRAINED))
    add(store, 1, 4, len(TRAINED))
    again = TrackedSteps(done=cursor.done, leads=cursor.leads)  # as the process that follows one that died
    for of in (cursor, again):
        assert taken + [step.step for step in of.take(store)] == TRAINED
        assert of.take(store, is_over=True) == []


def test_the_lowest_rank_leads_where_nothing_was_taken_yet() -> None:
    store = MemoryStore()
    add(store, 1, 0, 2)
    cursor = TrackedSteps()
    store.connection.execute("UPDATE steps SET duration_ns = NULL")
    assert cursor.take(store) == []
    add(store, 0, 0, 2)
    cursor.take(store, is_over=True)
    assert cursor.leads == {0: 0}
