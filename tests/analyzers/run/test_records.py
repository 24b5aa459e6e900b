"""Record coverage: missing ranks, empty tables and columns are reported."""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.analyze import record_coverage
from analyzers.run.explain import NEXT, WHY
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import assert_plain

MEASURED = dict.fromkeys(
    ("forward_ns", "backward_ns", "optimizer_ns", "collective_wait_ns", "loss", "grad_norm", "tokens"), 1
)


def analyze(store: MemoryStore) -> list[Finding]:
    found = record_coverage(store, Scope())
    for finding in found:
        for text in (finding.summary, WHY[finding.kind](finding), NEXT[finding.kind](finding)):
            assert_plain(text)
    return found


def recorded(ranks: tuple[int, ...], *, world_size: int = 4, spans: bool = True) -> MemoryStore:
    store = MemoryStore()
    store.add(
        "ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": world_size, "host": "a"} for rank in ranks]
    )
    store.add("steps", [{"attempt": 0, "rank": rank, "step": 1, **MEASURED} for rank in ranks])
    if spans:
        store.add("spans", [{"attempt": 0, "rank": rank, "step": 1, "kind": "data"} for rank in ranks])
    return store


def test_complete_records_give_no_finding() -> None:
    assert analyze(recorded((0, 1, 2, 3))) == []
    assert analyze(MemoryStore()) == [], "missing steps are reported by the analyses that need them"


def test_silent_ranks_are_named() -> None:
    (finding,) = analyze(recorded((0, 2)))
    assert (finding.status, finding.ranks, finding.attempt) == ("insufficient_data", (1, 3), 0)
    assert finding.summary == "Ranks 1 and 3 have no step in attempt 0 (2 of 4 ranks): nothing is known about them."


def test_missing_spans_are_reported() -> None:
    (finding,) = analyze(recorded((0, 1, 2, 3), spans=False))
    assert "no spans were recorded" in finding.summary


def test_an_attempt_that_died_before_its_first_step_is_not_a_gap() -> None:
    store = recorded((0, 1, 2, 3))
    store.add("ranks", [{"attempt": 1, "rank": 0, "wall_ns": 2, "world_size": 4}])
    assert analyze(store) == []


def test_columns_of_nulls_are_reported() -> None:
    store = recorded((0, 1, 2, 3))
    store.connection.execute("UPDATE steps SET grad_norm = NULL, tokens = NULL; UPDATE ranks SET host = NULL")
    spikes, tokens, ranks = analyze(store)
    assert "gradient norms were not recorded (to record them: `rankscope.log`)." in spikes.summary
    assert tokens.summary.startswith("Tokens per second, MFU and uneven batches are unknown: token counts were not")
    assert "host names were not recorded." in ranks.summary


def test_calls_between_the_phases_have_no_phase() -> None:
    """A loop that reduces its gradients by hand makes every call after the backward pass."""
    calls = [{"attempt": 0, "rank": rank, "step": 1, "seq": 1} for rank in range(4)]
    store = recorded((0, 1, 2, 3))
    store.add("collectives", calls)
    assert analyze(store) == []
    store = recorded((0, 1, 2, 3), spans=False)
    store.add("collectives", calls)
    phases, _ = analyze(store)
    assert phases.summary == (
        "Calls are not matched over ranks, or not separated from those of checkpoints: phases of calls were not "
        "recorded."
    )
