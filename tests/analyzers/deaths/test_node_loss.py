"""A node that stopped as a whole is the cause of the other ranks' ends, unless something of it reported an end."""

from __future__ import annotations

from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def _silent(world: World, *, at_s: float = 9.0) -> World:
    """Node 1 with rank 3 is silent from the last record on; the others lose their connections to it."""
    for rank in (0, 1, 2):
        world.enter(rank)
        world.event("exception", 0.5, rank=rank, type="RuntimeError", message="Connection closed by peer [10.0.0.2]:9")
    world.event("node_silent", at_s, node_rank=1, silent_s=9.0, ranks=[3])
    return world


def test_a_lost_node_is_the_cause_and_ranks_that_lost_their_peer_are_victims() -> None:
    (finding,) = judged_losses(_silent(World()).store, POLICY)
    assert (finding.cause, finding.ranks, finding.severity) == ("node_failed", (3,), "critical")
    assert finding.evidence["victims"] == [0, 1, 2]
    assert finding.summary.startswith("Node 1 ")


def test_ranks_that_the_scheduler_ended_afterwards_are_victims() -> None:
    world = World()
    world.event("node_silent", 9.0, node_rank=1, silent_s=9.0, ranks=[3])
    for rank in (0, 1, 2):
        world.event("rank_exit", 20.0, exit_rank=rank, exit_code=-15, signal="SIGTERM", pid=1, message="")
    world.event("run_ended", 21.0, node_rank=0, reason="preempted", exit_code=143, message="")
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("node_failed", (3,))


def test_a_rank_whose_end_was_recorded_is_the_cause_also_where_its_node_went_silent() -> None:
    world = _silent(World())
    world.event("rank_exit", 0.1, exit_rank=3, exit_code=-9, signal="SIGKILL", pid=1, message="")
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("signal", (3,))


def test_a_node_that_was_heard_again_was_not_lost() -> None:
    world = _silent(World())
    world.event("node_heard", 12.0, node_rank=1)
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.cause == "vanished"


def test_a_rank_of_another_node_that_failed_before_is_the_cause() -> None:
    world = World()
    world.event("exception", -8.0, rank=0, type="ValueError", message="bad sample")
    world.event("node_silent", 14.0, node_rank=1, silent_s=9.0, ranks=[3])
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("exception", (0,))


def test_a_node_is_not_lost_while_the_other_ranks_train_on() -> None:
    world = World()
    world.event("node_silent", -40.0, node_rank=1, silent_s=9.0, ranks=[3])
    world.event("exception", 0.5, rank=2, type="ValueError", message="bad sample")
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("exception", (2,))


def test_a_standstill_long_before_is_explained_as_a_hang() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    hang = {"finding_kind": "hang", "status": "fired", "severity": "critical", "cause": "not_entered"}
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1, 2, 3])
    world.event("finding", 6.1, analyzer="hang", finding_ranks=[1], summary="", **hang)
    world.event("node_silent", 60.0, node_rank=1, silent_s=9.0, ranks=[3])
    for rank in (0, 2):
        world.event("exception", 61.0, rank=rank, type="RuntimeError", message="Connection closed by peer [::1]:9")
    assert judged_losses(world.store, POLICY) == []
    (finding,) = judged_hangs(world.store, POLICY)
    assert finding.ranks == (1,)


def test_a_silent_node_of_a_live_run_without_deaths_is_not_lost() -> None:
    world = World()
    world.event("node_silent", 9.0, node_rank=1, silent_s=9.0, ranks=[3])
    assert judged_losses(world.store, POLICY, now_ns=world.after(10.0)) == []


def test_in_a_live_run_only_ranks_with_a_recorded_end_are_victims() -> None:
    """The others still wait for the node, until their launchers or the limits of a hang free them."""
    world = World()
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("exception", 0.5, rank=2, type="RuntimeError", message="Connection closed by peer [10.0.0.2]:9")
    world.event("node_silent", 9.0, node_rank=1, silent_s=9.0, ranks=[3])
    (finding,) = judged_losses(world.store, POLICY, now_ns=world.after(10.0))
    assert (finding.cause, finding.ranks, finding.evidence["victims"]) == ("node_failed", (3,), [2])
    assert finding.summary.endswith(" 1 other rank ended because of it.")
    for rank in (0, 1):
        world.event("rank_stopped", 21.0, exit_rank=rank, pid=1, exit_code=143)
    (finding,) = judged_losses(world.store, POLICY, now_ns=world.after(22.0))
    assert finding.evidence["victims"] == [0, 1, 2]
