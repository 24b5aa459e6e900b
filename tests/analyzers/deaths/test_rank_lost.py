"""Ranks that died: which one is the root, and what the records do not show."""

from __future__ import annotations

import signal

import pytest

from analyzers.deaths.recovery_response import done_about
from tests.analyzers.deaths.lost_ranks import GLOO, POLICY, killed, lost
from tests.analyzers.judged import judged_losses
from tests.analyzers.standstill import MS, World


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGABRT", -6)])
def test_a_signal_names_its_rank_and_the_others_are_victims(name: str, code: int) -> None:
    (finding,) = lost(killed(2, name, code))
    assert (finding.kind, finding.cause, finding.ranks) == ("rank_lost", "signal", (2,))
    assert finding.evidence["victims"] == [0, 1, 3]
    assert name in finding.summary
    assert finding.severity == "critical"


@pytest.mark.parametrize("has_loader", [False, True])
def test_a_killed_rank_is_reported_with_the_phase_that_it_finished_last(has_loader: bool) -> None:
    """A loop that makes its batches itself shows nothing between an update and the next pass of its model."""
    world = killed(2)
    if has_loader:
        world.span(2, "data", end_ns=world.now_ns + 1)
        world.now_ns += 1
    world.span(2, "optimizer", end_ns=world.now_ns + 1)
    (finding,) = lost(world)
    then = "." if has_loader else f", or as step {world.step + 1} began."
    assert f"at step {world.step} in user code after optimizer{then}" in finding.summary


def test_an_exception_is_the_root_and_the_errors_of_the_others_are_not() -> None:
    world = World()
    for other in (0, 1, 2):
        world.enter(other)
        world.event("exception", 0.01 * other, rank=other, type="DistBackendError", message="Connection reset by peer")
    world.event("exception", 0.05, rank=3, type="ValueError", message="bad sample\nmore", traceback="...")
    for rank in range(4):
        world.event("rank_exit", 0.2, exit_rank=rank, exit_code=1, signal=None, pid=1, message="")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (3,))
    assert "ValueError: bad sample" in finding.summary
    assert "more" not in finding.summary


@pytest.mark.parametrize("ended", [4, 3])
def test_ranks_that_all_exit_with_code_0_are_not_lost(ended: int) -> None:
    world = World()
    for rank in range(ended):
        world.event("rank_exit", 0.1 * rank, exit_rank=rank, exit_code=0, signal=None, pid=1, message="")
    found = judged_losses(world.store, POLICY)
    assert bool(found) == (ended < 4)  # where one is missing, it is asked for


def test_the_same_exception_everywhere_is_one_finding() -> None:
    world = World()
    for rank in range(4):
        world.event("exception", 0.1, rank=rank, type="KeyError", message="'lr'")
    (finding,) = lost(world)
    assert finding.ranks == (0, 1, 2, 3)
    assert "ended because of it" not in finding.summary


def test_a_script_that_failed_before_it_trained_was_not_between_steps() -> None:
    world = World(ranks=2)
    for table in ("steps", "collectives"):
        world.store.connection.execute(f"DELETE FROM {table}")
    for rank in range(2):
        world.event("exception", 0.1, rank=rank, type="ModuleNotFoundError", message="no x")
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.summary == "Ranks 0 and 1 died of ModuleNotFoundError: no x before the first step."


def test_a_rank_without_records_did_not_die_before_the_first_step_of_the_others() -> None:
    world = killed(2)
    for table in ("ranks", "steps", "collectives"):
        world.store.connection.execute(f"DELETE FROM {table} WHERE rank = 2")
    (finding,) = judged_losses(world.store, POLICY)
    assert (finding.ranks, finding.first_step) == ((2,), None)
    assert finding.summary == (
        f"Rank 2 died of SIGKILL while the other ranks were at step {world.step}. The other ranks ended because of it."
    )


def test_a_rank_without_records_is_one_of_the_others_only_if_its_end_is_recorded() -> None:
    world = killed(2)
    for table in ("ranks", "steps", "collectives", "events"):
        world.store.connection.execute(f"DELETE FROM {table} WHERE rank = 3")
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.evidence["victims"] == [0, 1]
    assert finding.summary.endswith("Ranks 0 and 1 ended because of it.")
    world.event("rank_exit", 0.2, exit_rank=3, exit_code=1, signal=None, pid=8, message=f"RuntimeError: {GLOO}")
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.evidence["victims"] == [0, 1, 3]
    assert finding.summary.endswith("The other ranks ended because of it.")


def test_a_death_seen_only_by_watch_is_found() -> None:
    world = World()
    for other in (0, 1, 3):
        world.enter(other)
    world.event("rank_state", 0.8, state_rank=2, state="dead", os_state="")
    assert lost(world, world.after(1.0)) == []
    (finding,) = lost(world, world.after(2.5))
    assert (finding.cause, finding.ranks) == ("vanished", (2,))


def test_processes_that_the_agent_ended_are_collateral() -> None:
    world = killed(1)
    for rank in range(4):
        world.event("rank_state", 0.9, state_rank=rank, state="dead", os_state="")
    (finding,) = lost(world)
    assert finding.ranks == (1,)


def test_two_faults_at_once_are_two_findings() -> None:
    world = killed(1)
    world.event("rank_exit", 0.1, exit_rank=3, exit_code=-11, signal="SIGSEGV", pid=9, message="")
    world.store.connection.execute("DELETE FROM events WHERE kind = 'exception' AND rank = 3")
    assert {f.ranks: f.evidence["signal"] for f in lost(world)} == {(1,): "SIGKILL", (3,): "SIGSEGV"}


def test_a_run_killed_whole_is_explained() -> None:
    world = World()
    for rank in (0, 2):
        world.enter(rank)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("killed_all", ())  # of a disk without space there is no more either
    assert "Records incomplete: all 4 ranks stopped at step 16" in finding.summary
    assert "killed from outside, the disk could not store their records, or this is a copy made" in finding.summary
    alone = World(ranks=1)
    alone.enter(0)
    (finding,) = lost(alone)
    assert finding.summary.endswith(
        "It was killed from outside, the disk could not store its records, or this is a copy made while it ran."
    )


def test_a_run_that_may_be_alive_is_not_declared_dead() -> None:
    world = World()
    assert lost(world, world.after(0.5)) == []


def test_in_a_live_run_an_exit_with_code_0_is_a_loss_if_the_others_do_not_follow() -> None:
    world = World()
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=0, signal=None, pid=1, message="")
    assert lost(world, world.after(5.0)) == []
    (finding,) = lost(world, world.after(12.0))
    assert (finding.cause, finding.ranks) == ("exit", (1,))


def test_an_exit_with_code_0_is_not_a_loss_while_the_others_keep_recording() -> None:
    """A rank that had less to do, in a script whose ranks do not wait for one another."""
    world = World()
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=0, signal=None, pid=1, message="")
    exit_ns, world.now_ns = world.now_ns, world.after(80.0)
    for rank in (0, 2, 3):
        world.span(rank, "forward")
    assert lost(world, world.after(5.0)) == []
    assert world.after(5.0) > exit_ns + 80 * 10**9
    (finding,) = lost(world, world.after(12.0))
    assert (finding.cause, finding.ranks) == ("exit", (1,))


def test_the_agents_sigterm_to_all_is_a_termination() -> None:
    world = World()
    for rank in range(4):
        world.event("rank_exit", 0.1, exit_rank=rank, exit_code=-15, signal="SIGTERM", pid=1, message="")
    (finding,) = lost(world)
    assert finding.cause == "ended_from_outside"
    assert "terminated from outside" in finding.summary


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (143, "its launcher got SIGTERM"),
        (128 + signal.SIGRTMIN + 9, "its launcher got SIGRTMIN+9"),
        (1, "its launcher was interrupted"),
        (255, "its launcher was interrupted"),
    ],
)
def test_a_job_whose_launcher_was_interrupted_lacks_no_records(exit_code: int, how: str) -> None:
    """Ranks of a script that handles no signal leave no record of their end."""
    world = World()
    world.store.event("run_ended", wall_ns=world.after(1), reason="interrupted", exit_code=exit_code)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks, finding.severity) == ("ended_from_outside", (0, 1, 2, 3), "info")
    assert f"The job was ended from outside at step 16: {how}" in finding.summary


@pytest.mark.parametrize("is_waiting", [True, False])
def test_ranks_that_do_not_end_on_a_signal_are_neither_lost_nor_hanging(is_waiting: bool) -> None:
    """The launcher kills them one by one, and the second sees its connection broken by the end of the first."""
    world = World(ranks=2)
    world.event("stop_requested", 0.02, node_rank=0, signal="SIGINT")
    if is_waiting:
        world.event("exception", 14.1, rank=1, type="RuntimeError", message=GLOO)
    for rank in (0, 1):
        world.event("rank_stopped", 14.02 + rank / 5, exit_rank=rank, pid=7 + rank, exit_code=-9)
        world.event("rank_state", 14.5, state_rank=rank, state="dead")
    world.event("run_ended", 16.0, node_rank=0, reason="interrupted", exit_code=130)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks, finding.severity) == ("ended_from_outside", (0, 1), "info")
    assert finding.summary == (
        "The job was ended from outside at step 16: its launcher got SIGINT. Ranks 0 and 1 did not end within 14 s and "
        "were killed by the launcher."
    )


def test_a_rank_that_died_before_the_signal_is_lost() -> None:
    world = killed(2)
    world.event("stop_requested", 0.15, node_rank=0, signal="SIGINT")
    world.event("rank_stopped", 14.0, exit_rank=0, pid=7, exit_code=-9)
    world.event("run_ended", 16.0, node_rank=0, reason="interrupted", exit_code=130)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks, finding.severity) == ("signal", (2,), "critical")


def test_a_death_in_an_earlier_attempt_is_found_with_what_followed() -> None:
    world = killed(2)
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(5))
    world.store.event("run_ended", attempt=1, wall_ns=world.after(60), reason="finished", exit_code=0)
    (finding,) = lost(world)
    assert (finding.attempt, finding.ranks, finding.severity) == (0, (2,), "warning")
    assert finding.summary.endswith("Restarted as attempt 1, whose first step is 11.")


def test_a_restart_names_the_checkpoint_that_it_loaded() -> None:
    world = killed(2)
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(5))
    # A download that turns out damaged, the copy on disk that is loaded instead, and a rollback to a later one.
    for seconds, tier, step in ((2, "remote", 12), (3, "disk", 10), (9, "disk", 14)):
        event = {"attempt": 1, "wall_ns": world.after(seconds), "rank": 0, "step": step}
        world.store.event("checkpoint", **event, tier=tier, state="loaded")
    world.store.event("attempt_started", attempt=1, wall_ns=world.after(1), world_size=4)
    world.store.event("run_ended", attempt=1, wall_ns=world.after(60), reason="finished", exit_code=0)
    (finding,) = lost(world)
    assert finding.summary.endswith("Restarted as attempt 1 from step 10.")
    assert "Resumed from step 10, loaded from disk." in done_about(world.store, finding)


@pytest.mark.parametrize(("device", "excluded"), [("GPU-3", "Device GPU-3 of node 1"), ("", "Node 1")])
def test_what_was_excluded_after_a_death_is_named(device: str, excluded: str) -> None:
    world = killed(2)
    world.store.event("excluded", attempt=0, wall_ns=world.after(1), node_rank=1, device=device)
    (finding,) = lost(world)
    assert f"{excluded} is excluded from then on." in done_about(world.store, finding)


def test_clocks_of_two_nodes_that_disagree_change_nothing() -> None:
    world = World(clock_offset_ns={2: 600 * 10**9, 3: 600 * 10**9})
    for other in (0, 2, 3):
        world.enter(other)
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=7, message="")
    (finding,) = lost(world)
    assert finding.ranks == (1,)


def test_missing_events_are_reported() -> None:
    world = World()
    world.store.drop("events")
    assert [f.status for f in judged_losses(world.store, POLICY)] == ["insufficient_data"]  # not: everybody was killed
    world.store.drop("steps")
    assert [f.status for f in judged_losses(world.store, POLICY)] == ["insufficient_data"]


def test_a_rank_past_the_phase_in_which_it_began_a_call_did_not_die_in_it() -> None:
    """The loop keeps the handle of a call of the forward pass, and waits for it in the backward pass."""
    world = killed()
    world.enter(2, phase="forward", is_async=True)
    world.span(2, "forward", end_ns=world.now_ns + MS)
    (finding,) = lost(world)
    assert finding.ranks == (2,)
    assert "died of SIGKILL at step 16 in user code after forward." in finding.summary
