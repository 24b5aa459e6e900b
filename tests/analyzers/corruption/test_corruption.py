"""Silent corruption from records: who, what, since when; and silence where all is as it must be."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.corruption.analyze import fingerprints
from analyzers.corruption.replicas import ALL_TENSORS, Fingerprint, judge
from analyzers.finding import Finding
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain

GROUP = "dp_replicate:0-3"


def judged(store: MemoryStore, **scope: Any) -> list[Finding]:
    return plain(fingerprints(store, Scope(**scope)))


def rows(values: dict[int, int], tensor: str = "model.a", expected: dict[int, int] | None = None) -> list[Fingerprint]:
    given = expected or {}
    return [
        Fingerprint(rank=rank, group=GROUP, tensor=tensor, hash=value, expected=given.get(rank))
        for rank, value in values.items()
    ]


def test_replicas_that_agree_give_no_finding() -> None:
    assert judge([]) is None
    assert judge(rows({0: 7, 1: 7, 2: 7}, expected={0: 7})) is None


def test_a_majority_names_the_odd_one() -> None:
    found = judge(rows({0: 7, 1: 7, 2: 9, 3: 7}) + rows({0: 1, 1: 1, 2: 2, 3: 1}, ALL_TENSORS))
    assert found is not None
    assert (found.kind, found.ranks, found.tensors, found.certain) == ("replica_mismatch", (2,), ("model.a",), True)
    assert found.text == "model.a on rank 2 differs from 3 replicas"


@pytest.mark.parametrize("values", [{0: 7, 1: 9}, {0: 7, 1: 7, 2: 9, 3: 9}, {0: 1, 1: 2, 2: 3}])
def test_without_a_majority_all_are_suspects(values: dict[int, int]) -> None:
    found = judge(rows(values))
    assert found is not None
    assert (found.ranks, found.certain) == (tuple(values), False)
    assert "differs between the replicas on ranks 0" in found.text


def test_the_chain_breaks_a_tie() -> None:
    found = judge(rows({0: 7, 1: 9}, expected={0: 7, 1: 7}))
    assert found is not None
    assert (found.kind, found.ranks, found.certain) == ("replica_mismatch", (1,), True)


def test_a_broken_chain_needs_no_replica() -> None:
    found = judge([Fingerprint(rank=3, group="shard:3", tensor="optimizer.a.exp_avg", hash=1, expected=2)])
    assert found is not None
    assert (found.kind, found.ranks, found.certain) == ("fingerprint_chain_broken", (3,), True)
    assert found.text == "optimizer.a.exp_avg on rank 3 changed between two optimizer steps"


def test_two_flips_at_once() -> None:
    found = judge(rows({0: 7, 1: 7, 2: 9, 3: 7}) + rows({0: 1, 1: 5, 2: 1, 3: 1}, "model.b"))
    assert found is not None
    assert (found.ranks, found.tensors) == ((1, 2), ("model.a", "model.b"))


# ---- over a store ----


def store_with(checks: dict[int, dict[int, dict[str, int]]], attempt: int = 0) -> MemoryStore:
    """Checks: step -> rank -> tensor -> hash, in the order in which they are given."""
    store = MemoryStore()
    table: list[dict[str, Any]] = []
    for number, (step, ranks) in enumerate(checks.items()):
        for rank, tensors in ranks.items():
            for tensor, value in tensors.items():
                row = {"attempt": attempt, "rank": rank, "step": step, "taken_ns": 1000 * number}
                table.append(row | {"replica_group": GROUP, "tensor": tensor, "hash": value, "expected_hash": None})
    store.add("fingerprints", table)
    return store


def healthy(value: int) -> dict[int, dict[str, int]]:
    return {rank: {ALL_TENSORS: value} for rank in range(4)}


def damaged(value: int, rank: int) -> dict[int, dict[str, int]]:
    return {
        other: {ALL_TENSORS: value + (other == rank), "model.head.weight": 5 + (other == rank)} for other in range(4)
    }


def test_a_damaged_rank_is_found_with_its_interval_and_what_was_done() -> None:
    store = store_with({10: healthy(1), 20: healthy(2), 30: damaged(3, rank=2), 40: healthy(4)})
    store.event("rollback", rank=0, step=31, from_step=31, to_step=20, tier="memory", verdict="corruption")
    (finding,) = judged(store)
    assert (finding.kind, finding.status, finding.ranks, finding.first_step) == ("replica_mismatch", "fired", (2,), 30)
    assert (finding.severity, finding.cause, finding.advice) == ("warning", "parameter", "replica-mismatch")
    assert finding.evidence["tensors"] == ["model.head.weight"]
    assert finding.evidence["last_healthy_step"] == 20
    assert finding.evidence["restored_step"] == 20
    assert finding.summary == (
        "At step 30, model.head.weight on rank 2 differs from 3 replicas. Rolled back to step 20 from memory."
    )


def test_repeated_mismatches_without_a_response_are_one_critical_finding() -> None:
    store = store_with({10: healthy(1), 20: damaged(2, rank=0), 30: damaged(3, rank=0), 40: damaged(4, rank=0)})
    (finding,) = judged(store)
    assert (finding.first_step, finding.last_step, finding.severity) == (20, 40, "critical")


def test_a_repeated_step_is_checked_separately() -> None:
    """The same step before and after a rollback: other hashes by right, if skipped batches changed what was trained."""
    store = store_with({10: healthy(1)})
    again = [
        {"attempt": 0, "rank": rank, "step": 10, "taken_ns": 5000, "replica_group": GROUP, "tensor": ALL_TENSORS}
        | {"hash": 77, "expected_hash": None}
        for rank in range(4)
    ]
    store.add("fingerprints", again)
    assert judged(store) == []


def test_a_run_without_fingerprints_is_not_judged() -> None:
    (finding,) = judged(MemoryStore())
    assert (finding.kind, finding.status) == ("replica_mismatch", "insufficient_data")
    assert "fingerprint_interval" in finding.summary


def test_a_live_check_waits_for_the_records_of_all_ranks() -> None:
    """Two ranks' rows are there and the others' are not yet: no majority, and nothing to be said."""
    early = {rank: row for rank, row in damaged(3, rank=1).items() if rank < 2}
    steps = [{"attempt": 0, "rank": rank, "step": 30, "start_ns": 900} for rank in range(4)]
    store = store_with({20: healthy(1), 30: early})
    store.add("steps", steps)
    assert judged(store, now_ns=1) == []
    store = store_with({20: healthy(1), 30: damaged(3, rank=1)})
    store.add("steps", [*steps, *(row | {"start_ns": 1001} for row in steps)])
    (finding,) = judged(store, now_ns=1)
    assert finding.ranks == (1,)
