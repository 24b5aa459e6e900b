"""A lost launcher is the cause of what happens to its ranks, unless one of them died before."""

from __future__ import annotations

from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def _lost(world: World) -> World:
    for rank in world.ranks:
        world.event("exception", 1.9, rank=rank, type="RuntimeError", message="Connection closed by peer [127.0.0.1]:9")
    world.event("launcher_lost", 2.0, node_rank=0, pid=4711, ranks=[0, 1, 2, 3])
    world.event("run_ended", 3.0, node_rank=0, reason="launcher_lost", exit_code=None, message="")
    return world


def test_a_lost_launcher_is_the_cause_of_the_ends_of_its_ranks() -> None:
    (finding,) = judged_losses(_lost(World()).store, POLICY)
    assert (finding.kind, finding.cause, finding.severity) == ("rank_lost", "launcher_lost", "critical")
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.evidence["launcher_pid"] == 4711


def test_the_checkpoint_of_the_ranks_is_named() -> None:
    world = _lost(World())
    world.event("preempted", 2.5, rank=0, signal="SIGTERM", checkpoint_step=9)
    (finding,) = judged_losses(world.store, POLICY)
    assert "saved a checkpoint at step 9" in finding.summary


def test_a_rank_that_died_long_before_is_the_cause() -> None:
    world = World()
    world.event("exception", -20.0, rank=3, type="ValueError", message="bad sample")
    (finding,) = judged_losses(_lost(world).store, POLICY)
    assert (finding.cause, finding.ranks) == ("exception", (3,))


def test_the_hang_for_which_a_launcher_was_killed_is_the_cause() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1, 2, 3])
    hang = {"finding_kind": "hang", "status": "fired", "severity": "critical", "cause": "not_entered"}
    world.event("finding", 6.1, analyzer="hang", finding_ranks=[1], summary="", **hang)
    world.event("launcher_lost", 20.0, node_rank=0, pid=4711, ranks=[0, 1, 2, 3])
    world.event("run_ended", 21.0, node_rank=0, reason="launcher_lost", exit_code=None, message="")
    assert judged_losses(world.store, POLICY) == []
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("not_entered", (1,))


def test_a_lost_launcher_without_ranks_is_a_spare_node_that_left() -> None:
    world = World()
    world.event("launcher_lost", -2.0, node_rank=1, pid=4711, ranks=[])
    world.event("preempted", 2.5, rank=0, signal="SIGTERM", checkpoint_step=9)
    world.event("run_ended", 3.0, node_rank=0, reason="preempted", exit_code=143, message="")
    (finding,) = [f for f in judged_losses(world.store, POLICY) if f.cause == "launcher_lost"]
    assert (finding.severity, finding.ranks, finding.first_step) == ("info", (), None)
    assert "A spare node left: the launcher of node 1 ended" in finding.summary
    assert "checkpoint" not in finding.summary, "another node's ranks saved it, for another reason"


def test_a_lost_node_is_reported_with_its_own_step_and_no_checkpoint_of_other_nodes() -> None:
    world = World()
    later = {"attempt": 0, "step": 326, "start_ns": world.after(2.2), "duration_ns": None}
    world.store.add("steps", [{**later, "rank": rank} for rank in (0, 1)])
    world.event("launcher_lost", 2.0, node_rank=1, pid=4711, ranks=[2, 3])
    world.event("preempted", 2.5, rank=0, signal="SIGTERM", checkpoint_step=326)
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.ranks, finding.first_step) == ((2, 3), world.step)
    assert "326" not in finding.summary
