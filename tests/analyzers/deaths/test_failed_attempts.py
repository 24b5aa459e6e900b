"""Which attempts failed: kills, crashes, hangs and lost nodes, and not what somebody asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from analyzers.checkpoints.interval import suggest
from analyzers.deaths.failed_attempts import failed_attempts
from analyzers.diagnose import diagnose
from analyzers.fleet.history import history_of
from tests.analyzers.deaths.lost_ranks import killed
from tests.analyzers.standstill import SECOND, World


def _closed(world: World, at_s: float = 0.5) -> None:
    for rank in world.ranks:
        world.event("rank_closed", at_s, rank=rank)


def _interrupted(world: World) -> None:
    """Ctrl-C: the ranks save and close."""
    _closed(world)
    world.event("interrupted", 0.4, rank=0, signal="SIGINT", checkpoint_step=15)
    world.event("run_ended", 1.0, reason="interrupted", exit_code=130)


def _interrupted_in_a_step(world: World) -> None:
    """Ctrl-C of a script that handles no signal: its ranks leave nothing."""
    world.event("run_ended", 1.0, reason="interrupted", exit_code=130)


def _preempted(world: World) -> None:
    _closed(world)
    world.event("run_ended", 1.0, reason="preempted", exit_code=143)


def _terminated(world: World) -> None:
    for rank in world.ranks:
        world.event("rank_exit", 0.1, exit_rank=rank, exit_code=-15, signal="SIGTERM", pid=1, message="")


def _joined(world: World) -> None:
    """A node joins: the ranks save, and start anew with it."""
    _closed(world)
    for rank in world.ranks:
        world.event("rank_stopped", 0.6, exit_rank=rank, pid=1, exit_code=143)


def _excluded(world: World) -> None:
    world.event("excluded", 0.2, node_rank=0, device="cuda:1", excluded_rank=1, failures=0, cause="straggler")
    for rank in world.ranks:
        world.event("rank_stopped", 0.6, exit_rank=rank, pid=1, exit_code=-9)


def _finished(world: World) -> None:
    _closed(world)
    world.event("run_ended", 1.0, reason="finished", exit_code=0)


@pytest.mark.parametrize(
    "end", [_interrupted, _interrupted_in_a_step, _preempted, _terminated, _joined, _excluded, _finished]
)
def test_an_end_on_request_is_not_a_failure(end: Callable[[World], None]) -> None:
    world = World()
    end(world)
    _resumed(world)
    assert failed_attempts(world.store, {}) == []


def _killed_whole(world: World) -> None:
    """Power failure: no end was recorded."""


def _hung(world: World) -> None:
    """A standstill that `watch` had reported, until somebody had seen enough of it."""
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("stacks", 20.0, ranks=[0, 1, 2, 3])
    _closed(world, 59.0)
    world.event("run_ended", 60.0, reason="interrupted", exit_code=130)


def _hung_and_killed(world: World) -> None:
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("culprit_killed", 20.0, killed_rank=3, pid=1, reason="it stood still")
    world.event("rank_exit", 20.1, exit_rank=3, exit_code=-9, signal="SIGKILL", pid=1, message="")


def _launcher_killed(world: World) -> None:
    world.event("launcher_lost", 0.1, node_rank=0, pid=1, ranks=[0, 1, 2, 3])
    _closed(world)
    world.event("run_ended", 1.0, reason="launcher_lost")


def _lost_elsewhere(world: World) -> None:
    """Only this node's records: its launcher ended the ranks because others had died."""
    for rank in world.ranks:
        world.event("rank_stopped", 0.6, exit_rank=rank, pid=1, exit_code=-9)


@pytest.mark.parametrize("end", [_killed_whole, _hung, _hung_and_killed, _launcher_killed, _lost_elsewhere])
def test_an_end_without_a_request_is_a_failure(end: Callable[[World], None]) -> None:
    world = World()
    end(world)
    _resumed(world)
    assert failed_attempts(world.store, {}) == [0]


def test_the_newest_attempt_counts_once_its_end_is_recorded() -> None:
    world = killed()
    assert failed_attempts(world.store, {}) == [], "it may start anew, or still run"
    assert failed_attempts(world.store, {}, is_over=True) == [0]
    world.event("run_ended", 1.0, reason="failed", exit_code=1)
    assert failed_attempts(world.store, {}) == [0]


def test_the_interval_and_the_fleet_count_failures_and_not_interruptions() -> None:
    """Two attempts interrupted, one killed: one failure, as the findings have it, and no incident of the host."""
    world = World()
    for attempt, end in enumerate((_interrupted, _interrupted_in_a_step, _killed_whole)):
        world.event("run_started", -2.0, node_rank=0)
        end(world)
        world = World(
            attempt=attempt + 1, first_step=world.step, store=world.store, start_ns=world.now_ns + 100 * SECOND
        )
    world.event("run_started", -2.0, node_rank=0)
    _finished(world)
    world.store.add("checkpoints", [{"attempt": 0, "rank": 0, "step": 5, "tier": "disk", "state": "verified",
                                     "stall_ns": 1_000_000, "duration_ns": 2_000_000}])  # fmt: skip
    found = suggest(world.store, {"world_size": 4})
    assert found is not None
    assert found.num_failures == 1
    world.store.connection.execute("UPDATE ranks SET host = 'node-0'")
    history = history_of(world.store, {}, diagnose(world.store, {}))
    assert (history.restarts, history.failures, history.incidents) == (0, 1, ())


def _resumed(world: World) -> None:
    World(attempt=1, first_step=world.step, store=world.store, start_ns=world.after(100))
