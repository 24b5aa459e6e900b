"""Each step is sent once, whatever comes into the store first."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.analyzers.memory_store import MemoryStore
from watch.exporting.otel.step_spans import RANKS, StepSpans

STEP_NS = 1_000_000
LATER_NS = 1_000
"""By which the ranks that come later begin each step after the others."""
RANKS_PER_NODE = 4
FIRST = [rank for rank in range(1, 3 * RANKS_PER_NODE) if rank not in (4, 8, 11)]
LATE = [0, 4, 8, 11]


def register(store: MemoryStore, ranks: list[int]) -> None:
    store.add("ranks", [{"attempt": 0, "rank": rank, "node_rank": rank // RANKS_PER_NODE} for rank in ranks])


def train(store: MemoryStore, ranks: list[int], first: int, last: int) -> None:
    """Steps `first` to `last` of the ranks."""
    store.add(
        "steps",
        [
            {
                "attempt": 0,
                "rank": rank,
                "step": step,
                "start_ns": step * STEP_NS + (LATER_NS if rank in LATE else 0),
                "duration_ns": STEP_NS // 2,
            }
            for step in range(first, last + 1)
            for rank in ranks
        ],
    )


@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("first", [FIRST, FIRST[:3]], ids=["all_nodes", "one_node"])
def test_lower_ranks_that_come_later_repeat_nothing(strategy: str, first: list[int]) -> None:
    store = MemoryStore()
    register(store, first)
    train(store, first, 1, 3)
    cursor = StepSpans(run_id="demo", group="default", ranks=strategy)
    spans = cursor.take(store)
    others = [rank for rank in (*FIRST, *LATE) if rank not in first]
    register(store, others)
    train(store, others, 1, 5)
    train(store, first, 4, 5)
    while taken := cursor.take(store):
        spans += taken
    steps = Counter(span.attributes["rankscope.step"] for span in spans if span.name == "train.step")
    assert steps == dict.fromkeys(range(1, 6), 1)
    assert len({span.span_id for span in spans}) == len(spans)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single_rank", [1]), ("first_rank_per_node", [1, 4, 8]), ("sampled", [1, 2, 3, 0, 11])]
)
def test_ranks_that_were_chosen_stay_and_new_ones_join_them(strategy: str, ranks: list[int]) -> None:
    store = MemoryStore()
    register(store, FIRST[:3])
    train(store, FIRST[:3], 1, 3)
    cursor = StepSpans(run_id="demo", group="default", ranks=strategy)
    cursor.take(store)
    everyone = [*FIRST, *LATE]
    register(store, [rank for rank in everyone if rank not in FIRST[:3]])
    train(store, everyone, 4, 4)
    named = {span.attributes.get("rankscope.rank") for span in cursor.take(store)}
    assert named.issuperset(ranks)
    assert len(named - {None}) == {"single_rank": 1, "first_rank_per_node": 3, "sampled": 8}[strategy]
