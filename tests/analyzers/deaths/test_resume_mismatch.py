"""Resume mismatches: one finding an attempt, with the parts and ranks that differ."""

from __future__ import annotations

from analyzers.deaths.resume_mismatch import resume_mismatches
from analyzers.finding import Finding
from analyzers.scope import Scope
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore


def analyze(store: MemoryStore) -> list[Finding]:
    return checked(resume_mismatches(store, Scope()))


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
    assert (
        first.summary
        == "Attempt 2 resumed from step 40 with a state that differs from the checkpoint's in rng (rank 1)."
    )
    assert (second.ranks, second.cause, second.severity) == ((0, 1), "several", "critical")
    assert second.summary.endswith("differs from the checkpoint's in data and rng (2 ranks).")


def test_other_data_are_a_warning() -> None:
    store = MemoryStore()
    store.event("resume_differs", attempt=1, rank=0, step=60, parts=["data"])
    (finding,) = analyze(store)
    assert (finding.severity, finding.cause) == ("warning", "data")
    assert finding.summary == (
        "Attempt 1 resumed from step 60 with training data that differs from the checkpoint's (rank 0)."
    )


def test_damaged_events_break_nothing() -> None:
    store = MemoryStore()
    store.event("resume_differs", attempt=1, rank=1, step=None, parts="x")
    (finding,) = analyze(store)
    assert finding.evidence["differing_parts"] == []
