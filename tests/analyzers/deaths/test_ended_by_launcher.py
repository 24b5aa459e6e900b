"""Ranks that a launcher ended, and ranks of which there is no record: no more is said of them than is recorded."""

from __future__ import annotations

import pytest

from tests.analyzers.deaths.lost_ranks import GLOO, POLICY, lost
from tests.analyzers.judged import judged_losses
from tests.analyzers.standstill import World


@pytest.mark.parametrize("now_s", [None, 30.0], ids=["afterwards", "live"])
def test_ranks_that_a_launcher_ended_to_start_anew_were_not_killed_from_outside(now_s: float | None) -> None:
    """A node of which only its own ranks are known: why they started anew is recorded at the others."""
    world = World()
    for rank in range(4):
        world.enter(rank)
        world.event("rank_state", 2.5, state_rank=rank, pid=1, state="dead", os_state="")
    now_ns = None if now_s is None else world.after(now_s)
    (finding,) = lost(world, now_ns)
    assert finding.cause == "killed_all", "without a word of their launchers"
    for rank in range(4):
        world.event("rank_stopped", 2.4, exit_rank=rank, pid=1, exit_code=-9)
    assert lost(world, now_ns) == []


def test_a_rank_that_its_launcher_ended_has_not_vanished() -> None:
    world = World()
    world.event("rank_state", 0.5, state_rank=1, pid=1, state="dead", os_state="")
    (finding,) = lost(world, world.after(4.0))
    assert (finding.cause, finding.ranks) == ("vanished", (1,))
    world.event("rank_stopped", 0.6, exit_rank=1, pid=1, exit_code=143)
    assert lost(world, world.after(4.0)) == []


@pytest.mark.parametrize("error", [GLOO, ""], ids=["lost-connections", "killed"])
def test_records_of_some_ranks_say_nothing_about_the_others(error: str) -> None:
    """The watch of a node with a disk of its own has no records of the other nodes' ranks."""
    world = World(ranks=2)
    world.store.add("ranks", [{"attempt": 0, "rank": 0, "wall_ns": 1, "world_size": 8}])
    for rank in (0, 1) if error else ():
        world.enter(rank)
        world.event("exception", 0.02, rank=rank, type="RuntimeError", message=error)
    (finding,) = lost(world)
    expected = (
        ("2 of 8 ranks report", "There are no records of 6 other ranks") if error else ("all 2 recorded ranks of 8",)
    )
    assert all(text in finding.summary for text in expected), finding.summary
    assert "No rank is missing" not in finding.summary


def test_ranks_ended_by_a_signal_during_start_up_are_explained_before_their_launcher_records_its_end() -> None:
    """Ranks that have not reached their first step show no progress before the signal."""
    world = World(ranks=2)
    for table in ("steps", "collectives"):
        world.store.connection.execute(f"DELETE FROM {table}")
    world.event("stop_requested", 1.0, node_rank=0, signal="SIGTERM")
    for rank in (0, 1):
        world.event("rank_state", 2.0, state_rank=rank, state="dead")
    (finding,) = judged_losses(world.store, POLICY, world.after(5.0))
    assert (finding.cause, finding.severity) == ("ended_from_outside", "info")
    assert "before the first step: its launcher got SIGTERM" in finding.summary
