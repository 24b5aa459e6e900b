from __future__ import annotations

from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()
GROUP = "pp[0, 1, 2, 3]"
LARGE, SMALL = {"bytes": 8192, "shape": "2048"}, {"bytes": 4096, "shape": "1024"}


def message(world: World, rank: int, op: str, peer: int, seq: int = 30, **columns: Any) -> None:
    world.enter(rank, GROUP, seq, op=op, peer=peer, **columns)


def pipeline(send: dict[str, Any], recv: dict[str, Any]) -> World:
    """Stage 0 sends to stage 1, and the others wait for what comes after."""
    world = World(groups={GROUP: (0, 1, 2, 3)})
    message(world, 0, "send", 1, **send)
    message(world, 1, "recv", 0, **recv)
    message(world, 2, "recv", 1)
    message(world, 3, "recv", 2)
    return world


def found(world: World) -> Finding:
    (finding,) = judged_hangs(world.store, POLICY, world.after(6.0))
    assert judged_losses(world.store, POLICY, world.after(6.0)) == []
    return finding


@pytest.mark.parametrize(("send", "recv"), [(LARGE, SMALL), (SMALL, LARGE)])
def test_a_send_and_its_receive_of_unequal_sizes_are_named_with_both_sizes(
    send: dict[str, Any], recv: dict[str, Any]
) -> None:
    world = World(groups={GROUP: (0, 1, 2, 3)})
    message(world, 0, "send", 1, **send)
    message(world, 1, "recv", 0, **recv)
    finding = found(world)
    assert (finding.cause, finding.ranks) == ("mismatch_size", (0, 1))
    assert finding.evidence["differs"] == {
        "send of {:,} elements ({:,} bytes)".format(int(send["shape"]), send["bytes"]): [0],
        "recv of {:,} elements ({:,} bytes)".format(int(recv["shape"]), recv["bytes"]): [1],
    }
    assert "Different sizes in send #30 to rank 1 at step 16: send of" in finding.summary


def test_in_a_pipeline_the_stages_behind_only_wait() -> None:
    finding = found(pipeline(LARGE, SMALL))
    assert (finding.cause, finding.ranks) == ("mismatch_size", (0, 1))
    assert finding.evidence["waiting_ranks"] == [2, 3]


def test_element_types_that_differ_are_named() -> None:
    finding = found(pipeline({"dtype": "bfloat16"}, {"dtype": "float32"}))
    assert (finding.cause, finding.ranks) == ("mismatch_dtype", (0, 1))
    assert set(finding.evidence["differs"]) == {"send of bfloat16", "recv of float32"}


def test_messages_that_fit_are_not_blamed() -> None:
    assert found(pipeline(LARGE, LARGE)).cause == "all_entered"


def test_a_link_has_two_ends_also_where_the_sender_has_gone_on() -> None:
    world = World(groups={GROUP: (0, 1, 2, 3)})
    message(world, 0, "send", 1, end_ns=world.now_ns, **LARGE)
    message(world, 0, "recv", 3, 5)
    message(world, 1, "recv", 0, **LARGE)
    message(world, 3, "recv", 1)
    finding = found(world)
    assert (finding.cause, finding.ranks) == ("all_entered", (0, 1))
    assert finding.summary.startswith("Recv #30 from rank 0 on rank 1 at step 16 does not return, and both ends")


def test_messages_with_tags_may_be_taken_in_another_order() -> None:
    world = World(groups={GROUP: (0, 1, 2, 3)})
    for seq, send, recv in ((30, LARGE, SMALL), (31, SMALL, LARGE)):
        message(world, 0, "send", 1, seq, **send)
        message(world, 1, "recv", 0, seq, **recv)
    assert found(world).cause == "all_entered"


def test_messages_with_different_sequence_numbers_are_not_matched() -> None:
    world = World(groups={GROUP: (0, 1, 2, 3)})
    message(world, 0, "send", 1, 31, **LARGE)
    message(world, 1, "recv", 0, 30, **SMALL)
    assert not found(world).cause.startswith("mismatch")


def test_a_rank_that_never_came_is_blamed_first() -> None:
    world = pipeline(LARGE, SMALL)
    world.store.connection.execute("DELETE FROM collectives WHERE rank = 2 AND end_ns IS NULL")
    finding = found(world)
    assert finding.ranks == (2,)


def test_a_run_that_was_killed_in_such_a_pair_was_killed() -> None:
    """A larger receive is allowed by gloo: in flight for a moment it says nothing."""
    world = pipeline(SMALL, LARGE)
    assert judged_hangs(world.store, POLICY) == []
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.cause == "killed_all"
