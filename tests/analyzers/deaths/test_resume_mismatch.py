"""Resumes that differ: one finding an attempt, with what and whose."""

from __future__ import annotations

from analyzers.deaths.resume_mismatch import analyze
from tests.analyzers.memory_store import MemoryStore


def test_what_differs_and_on_which_rank() -> None:
    store = MemoryStore()
    assert analyze(store) == []
    store.event("resume_differs", attempt=2, rank=1, step=40, parts=["rng"])
    store.event("resume_differs", attempt=3, rank=0, step=60, parts=["data"])
    store.event("resume_differs", attempt=3, rank=1, step=60, parts=["data", "rng"])
    first, second = analyze(store)
    assert (first.kind, first.status, first.ranks, first.cause, first.attempt) == (
        "resume_differs",
        "fired",
        (1,),
        "rng",
        2,
    )
    assert first.summary == "attempt 2 goes on from step 40 with other rng than were saved (rank 1)"
    assert (second.ranks, second.cause) == ((0, 1), "several")


def test_damaged_events_break_nothing() -> None:
    store = MemoryStore()
    store.event("resume_differs", attempt=1, rank=1, step=None, parts="x")
    (finding,) = analyze(store)
    assert finding.evidence["differing_parts"] == []
