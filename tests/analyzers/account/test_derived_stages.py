"""Order of a pipeline from its messages."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.account.timings import load_places, stages_of_messages
from tests.analyzers.memory_store import MemoryStore


def store(messages: list[tuple[int, str, int]], **place: int) -> MemoryStore:
    """(rank, op, peer) in the order in which they were issued."""
    made = MemoryStore()
    ranks = sorted({rank for rank, _, _ in messages})
    made.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": len(ranks), **place} for rank in ranks])
    calls: list[dict[str, Any]] = [
        {"attempt": 0, "rank": rank, "step": 1, "op": op, "peer": peer, "issue_ns": when}
        for when, (rank, op, peer) in enumerate(messages)
    ]
    made.add("collectives", calls)
    return made


def test_a_chain_has_an_order_whatever_the_numbers_of_its_ranks() -> None:
    chain = [(2, "send", 0), (0, "recv", 2), (0, "send", 1), (1, "recv", 0), (1, "send", 0), (0, "recv", 1)]
    assert stages_of_messages(store(chain), 0) == {2: 0, 0: 1, 1: 2}
    assert load_places(store(chain), 0)[0] == {0: 1, 1: 2, 2: 0}


def test_a_recorded_place_takes_precedence() -> None:
    assert load_places(store([(0, "send", 1), (1, "recv", 0)], pp=0), 0)[0] == {0: 0, 1: 0}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [(rank, "send", (rank + 1) % 3) for rank in range(3)],  # a ring
        [(rank, "recv", (rank + 1) % 3) for rank in range(3)],
        [(0, "send", 2), (1, "recv", 0), (2, "recv", 1), (3, "send", 1)],  # chains of two lengths
        [(1, "recv", 0)],  # the sender is not recorded
    ],
)
def test_other_patterns_have_no_order(messages: list[tuple[int, str, int]]) -> None:
    assert stages_of_messages(store(messages), 0) == {}
