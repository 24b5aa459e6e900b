"""Hangs at the end of a run: what was reported while it lived stands, and an end is no hang."""

from __future__ import annotations

import pytest

from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()
SILENT_S = 6.0
GLOO = "[gloo/transport/tcp/pair.cc:553]"


def hung_killed_and_restarted() -> World:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.event("stacks", 5.8, path="stacks", ranks=[0, 1, 2, 3])
    world.event("culprit_killed", 6.0, killed_rank=1, pid=7, reason="...")
    # What the others record afterwards is its consequence.
    world.store.connection.execute(f"UPDATE collectives SET end_ns = {world.after(6.01)} WHERE end_ns IS NULL")
    for rank in (0, 2, 3):
        world.event("exception", 6.05, rank=rank, type="RuntimeError", message="Connection closed by peer")
    world.event("rank_exit", 6.1, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=7, message="")
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(9))
    world.store.event("run_ended", attempt=1, wall_ns=world.after(20), reason="finished", exit_code=0)
    return world


def test_a_hang_that_watch_ended_reads_the_same_afterwards() -> None:
    world = hung_killed_and_restarted()
    assert judged_losses(world.store, POLICY) == []
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks, finding.attempt) == ("not_entered", (1,), 0)
    assert finding.evidence["waiting_ranks"] == [0, 2, 3]
    assert finding.summary.endswith(" Restarted as attempt 1, whose first step is 11.")
    assert 5.9 < finding.evidence["silent_s"] < 6.1


@pytest.mark.parametrize("reason", ["finished", "interrupted"])
def test_a_clean_end_is_silent(reason: str) -> None:
    world = World()
    for rank in range(4):
        world.event("rank_closed", 0.1, rank=rank)
    world.event("run_ended", 30.0, reason=reason, exit_code=0)
    for now_ns in (None, world.after(100)):
        assert judged_hangs(world.store, POLICY, now_ns) == []
        assert judged_losses(world.store, POLICY, now_ns) == []


def test_an_attempt_whose_ranks_all_closed_for_a_restart_is_silent_however_late_the_run_ends() -> None:
    world = World()
    for rank in range(4):
        world.event("rank_closed", 0.1, rank=rank)
    World(attempt=1, first_step=17, store=world.store, start_ns=world.after(9))
    world.store.event("run_ended", attempt=1, wall_ns=world.after(600), reason="finished", exit_code=0)
    assert judged_hangs(world.store, POLICY) == []


@pytest.mark.parametrize("excluded", [True, False])
def test_a_node_that_was_asked_to_leave_does_not_make_the_others_hang(excluded: bool) -> None:
    """As its watch sees it, whose copy of the other node's records is older than its launcher's end."""
    world = World()
    for rank in (0, 1):
        world.enter(rank)
    if excluded:
        world.event("excluded", 0.0, node_rank=1, device="slot 0", excluded_rank=2, failures=0, reason="Slow.")
    for rank in (2, 3):
        world.event("rank_closed", 0.1, rank=rank)
    world.event("run_ended", 12.0, reason="failed", exit_code=5)
    for now_ns in (None, world.after(13)):
        assert len(judged_hangs(world.store, POLICY, now_ns)) == (not excluded)


@pytest.mark.parametrize("ending", ["", "interrupted"])
def test_a_rank_that_came_to_its_end_while_others_go_on_is_named(ending: str) -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.event("rank_closed", 0.0, rank=1)
    if ending:
        world.event("run_ended", 60.0, reason=ending, exit_code=130)
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("finished", (1,))
    assert "finished and closed" in finding.summary
    assert finding.advice == "hang-finished"
    assert judged_losses(world.store, POLICY) == []


def test_ranks_that_close_after_an_interruption_do_not_hang() -> None:
    world = World()
    world.enter(0)
    world.event("rank_closed", 0.2, rank=1)
    world.event("run_ended", 0.5, reason="interrupted", exit_code=130)
    assert judged_hangs(world.store, POLICY) == []


@pytest.mark.parametrize("ends", ["closed", "killed", "terminated", "running"])
def test_a_reported_hang_stands_when_the_job_is_ended_from_outside(ends: str) -> None:
    """Ranks that are interrupted leave their calls and phases and close: nothing was begun, so nothing is over."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank, end_ns=world.after(12.0))
        world.span(rank, "backward", end_ns=world.after(12.0))
    world.event("finding", 8.0, finding_kind="hang", status="fired")
    if ends == "closed":
        world.event("run_ended", 12.1, rank=0, reason="interrupted", exit_code=130)
    for rank in range(4):
        if ends == "closed":
            world.event("rank_closed", 12.1, rank=rank)
        elif ends == "killed":
            world.event("rank_state", 12.5, state_rank=rank, state="dead")
        elif ends == "terminated":
            world.event("rank_exit", 12.5, exit_rank=rank, exit_code=-2, signal="SIGINT")
    for now_ns in (None, world.after(13.0)) if ends != "running" else (world.after(13.0),):
        (finding,) = judged_hangs(world.store, POLICY, now_ns)
        assert (finding.cause, finding.ranks) == ("not_entered", (1,))
        assert judged_losses(world.store, POLICY, now_ns) == []


def test_a_standstill_that_the_run_left_is_over() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank, end_ns=world.after(12.0))
    world.event("finding", 8.0, finding_kind="hang", status="fired")
    world.now_ns = world.after(12.0)
    for rank in range(4):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY, world.after(1.0)) == []


def test_a_rank_that_crashes_in_a_standstill_is_what_ended_the_run() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.event("finding", 8.0, finding_kind="hang", status="fired")
    world.event("rank_exit", 12.0, exit_rank=1, exit_code=-11, signal="SIGSEGV")
    assert judged_hangs(world.store, POLICY, None) == []
    (finding,) = judged_losses(world.store, POLICY, None)
    assert (finding.cause, finding.ranks) == ("signal", (1,))


def test_a_rank_that_leaves_slowly_while_others_wait_is_what_ended_the_run() -> None:
    """Its process takes seconds from its last record to its end, and the others wait for so long."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.event("rank_closed", 0.1, rank=1)
    world.event("finding", 8.0, finding_kind="hang", status="fired")
    for rank in (0, 2, 3):
        message = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61873."
        world.event("exception", 9.0, rank=rank, type="RuntimeError", message=message)
    world.event("rank_exit", 9.1, exit_rank=1, exit_code=0)
    assert judged_hangs(world.store, POLICY, None) == []
    (finding,) = judged_losses(world.store, POLICY, None)
    assert (finding.cause, finding.ranks) == ("exit", (1,))


@pytest.mark.parametrize(("left_s", "is_hang"), [(1.0, False), (11.0, True)])
def test_a_launcher_that_ends_long_after_its_ranks_is_no_silence_of_theirs(left_s: float, is_hang: bool) -> None:
    """It was told to stop and so were they; the watch left with them, or saw them stand still."""
    world = World(ranks=2)
    world.enter(0)
    world.event("watch_started", -1.0, pid=7)
    world.event("watch_stopped", left_s, pid=7)
    assert bool(judged_hangs(world.store, POLICY, world.after(12))) == is_hang, "by the last round of that watch"
    world.event("run_ended", 12.0, reason="interrupted", exit_code=143)
    assert bool(judged_hangs(world.store, POLICY)) == is_hang


def test_a_hang_that_was_reported_stands_before_anything_recorded_the_end() -> None:
    """The launcher got a SIGKILL: the run is no longer alive, and neither its end nor the stacks are written yet."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    report = {"finding_kind": "hang", "status": "fired", "severity": "critical", "cause": "not_entered"}
    world.event("finding", 5.5, analyzer="hang", finding_ranks=[1], summary="", **report)
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("not_entered", (1,))


def node_of_rank_3_lost(*, silent_at_s: float = 9.0) -> World:
    """All others wait for rank 3, and rank 2 dies of its broken connection to it."""
    world = World()
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("exception", 0.5, rank=2, type="RuntimeError", message=f"{GLOO} Connection closed by peer [10.0.0.4]:9")
    world.event("rank_exit", 0.6, exit_rank=2, exit_code=1, pid=7, message="")
    world.event("node_silent", silent_at_s, node_rank=3, silent_s=9.0, ranks=[3])
    return world


def test_ranks_that_wait_for_a_lost_node_hang_although_another_has_died_of_it() -> None:
    world = node_of_rank_3_lost()
    (finding,) = judged_hangs(world.store, POLICY, now_ns=world.after(10))
    assert (finding.cause, finding.ranks, finding.status) == ("not_entered", (3,), "fired")
    assert finding.evidence["waiting_ranks"] == [0, 1]
    assert finding.evidence["silent_s"] == 10.0
    (lost,) = judged_losses(world.store, POLICY, now_ns=world.after(10))
    assert (lost.cause, lost.ranks) == ("node_failed", (3,))


def test_a_lost_node_is_no_hang_within_the_limit() -> None:
    """A step that takes long is no standstill: its ranks are not ended on the word that a node is lost."""
    world = node_of_rank_3_lost(silent_at_s=1.0)
    assert judged_hangs(world.store, POLICY, now_ns=world.after(4.9)) == []
    (finding,) = judged_hangs(world.store, POLICY, now_ns=world.after(5.1))
    assert finding.ranks == (3,)
    world.span(0, "checkpoint")
    assert judged_hangs(world.store, POLICY, now_ns=world.after(60)) == []


@pytest.mark.parametrize("heard", [True, False], ids=["the-node-is-there", "no-rank-waits"])
def test_a_death_is_not_reported_as_a_hang(heard: bool) -> None:
    world = node_of_rank_3_lost()
    if heard:
        world.event("node_heard", 9.5, node_rank=3)
    for rank in () if heard else (0, 1):
        world.event("rank_stopped", 9.5, exit_rank=rank, pid=1, exit_code=143)
    assert judged_hangs(world.store, POLICY, now_ns=world.after(30)) == []


@pytest.mark.parametrize("reason", ["finished", "interrupted"])
def test_what_a_later_launch_records_is_no_end_of_an_attempt_that_was_killed_whole(reason: str) -> None:
    """A power failure leaves nothing; the run is resumed a minute later, and that launch records its end."""
    world = World()
    world.event("run_started", -2.0, node_rank=0)
    resumed = World(attempt=1, first_step=16, store=world.store, start_ns=world.after(60))
    world.event("run_started", 59.0, node_rank=0)
    for rank in resumed.ranks:
        resumed.event("rank_closed", 0.1, rank=rank)
    resumed.event("run_ended", 1.0, reason=reason, exit_code=0 if reason == "finished" else 130)
    assert judged_hangs(world.store, POLICY) == []
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.attempt, finding.cause) == (0, "killed_all")


def test_an_interrupted_launch_without_ranks_does_not_explain_the_end_of_the_previous_one() -> None:
    world = World()
    world.event("run_started", -2.0, node_rank=0)
    world.event("run_started", 59.0, node_rank=0)
    world.event("run_ended", 60.0, reason="interrupted", exit_code=130)  # of attempt 0: there was no other
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.cause == "killed_all"


@pytest.mark.parametrize("is_stopped", [True, False])
def test_errors_raised_while_ranks_are_stopped_do_not_explain_the_hang(is_stopped: bool) -> None:
    """As of a handler that prints to a terminal that was closed."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    hang = {"finding_kind": "hang", "status": "fired", "severity": "critical", "cause": "not_entered"}
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1, 2, 3])
    world.event("finding", 6.1, analyzer="hang", finding_ranks=[1], summary="", **hang)
    if is_stopped:
        world.event("stop_requested", 20.0, node_rank=0, signal="SIGHUP")
    world.event("exception", 25.2, rank=1, type="OSError", message="[Errno 5] Input/output error")
    world.event("run_ended", 27.0, node_rank=0, reason="interrupted", exit_code=129, message="")
    hangs, losses = judged_hangs(world.store, POLICY), judged_losses(world.store, POLICY)
    assert [(f.kind, f.ranks) for f in [*hangs, *losses]] == [("hang" if is_stopped else "rank_lost", (1,))]
    if is_stopped:
        assert hangs[0].evidence["silent_s"] == pytest.approx(20, abs=0.1), "what follows is the launcher's shutdown"
