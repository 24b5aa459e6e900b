"""Phases that a loop has named, beside training: shares of the steps, the longest first."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.account.named_phases import named_phases
from analyzers.report.wording.account_lines import phases_line
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import MS, plain_run
from tests.sentences import assert_plain

STEPS, RANKS = 20, 2


def spans(store: MemoryStore, kind: str, took_ms: int, *, waited_ms: int = 0, every: int = 1) -> None:
    """One span of each rank in every so many steps."""
    for rank in range(RANKS):
        number = np.arange(every, STEPS + 1, every)
        store.add_columns(
            "spans", attempt=np.zeros(len(number), np.int32), rank=np.full(len(number), rank, np.int32), step=number,
            kind=np.full(len(number), kind), start_ns=number * 100 * MS, end_ns=(number * 100 + took_ms) * MS,
            wait_ns=np.full(len(number), waited_ms * MS),
        )  # fmt: skip


def test_the_longest_comes_first_with_training_among_them() -> None:
    store = plain_run(ranks=RANKS, steps=STEPS, step_ms=1000.0)  # 950 ms of training, as its phases say
    store.connection.execute("UPDATE steps SET forward_ns = 50000000, backward_ns = 100000000, optimizer_ns = 0")
    spans(store, "generation", 600)
    spans(store, "reward", 250, waited_ms=200)
    spans(store, "log_probs", 40, every=2)
    spans(store, "forward", 50)
    found = named_phases(store)
    assert [(one.name, one.own_ms, one.share_ratio) for one in found] == [
        ("generation", 600.0, 0.6), ("training", 150.0, 0.15), ("reward", 50.0, 0.05), ("log_probs", 20.0, 0.02),
    ]  # fmt: skip
    line = phases_line([{"name": one.name, "own_ms": one.own_ms, "share_ratio": one.share_ratio} for one in found])
    assert line == (
        "Of step time: 60 % generation, 15 % training, 5 % reward, 2 % log_probs. "
        "The slowest is generation: 600 ms per step."
    )
    assert_plain(line)


def test_spans_whose_names_were_lost_are_no_phases_of_the_loop() -> None:
    store = plain_run(ranks=RANKS, steps=STEPS)
    spans(store, "?70", 5)
    assert named_phases(store) == []


def test_nothing_is_reported_without_named_phases() -> None:
    store = plain_run(ranks=RANKS, steps=STEPS)
    spans(store, "forward", 50)
    assert named_phases(store) == []
    assert phases_line([]) == ""


@pytest.mark.parametrize("gone", ["steps", "spans"])
def test_missing_records_have_no_phases(gone: str) -> None:
    store = plain_run(ranks=RANKS, steps=STEPS)
    spans(store, "generation", 50)
    store.drop(gone)
    assert named_phases(store) == []
