"""A node's silence is over once it is heard, also by another watch than the one that reported it."""

from __future__ import annotations

import pytest

from analyzers.hangs.analyze import silent_nodes
from analyzers.scope import Scope
from tests.analyzers.judged import checked
from tests.analyzers.standstill import World

CLOCK = {"offset_ns": 1_000_000, "error_ns": 2_000_000}


@pytest.mark.parametrize(
    ("attempt", "node", "cause"),
    [(1, 1, "reports_again"), (1, 2, "silent"), (0, 1, "silent")],
    ids=["it came back", "another node", "the clock of a node whose watch stands still"],
)
def test_a_node_that_answers_in_a_later_attempt_has_come_back(attempt: int, node: int, cause: str) -> None:
    world = World()
    world.event("node_silent", 9.0, node_rank=1, silent_s=60.0, ranks=[3], never_heard=True)
    world.store.event(
        "clock_offset", attempt=attempt, rank=-1, wall_ns=world.after(40.0), step=None, node_rank=node, **CLOCK
    )
    (finding,) = checked(silent_nodes(world.store, Scope()))
    assert (finding.kind, finding.cause) == ("node_silent", cause)
