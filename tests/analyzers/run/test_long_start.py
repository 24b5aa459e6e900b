"""A silence is no hang while processes are at work that no rank waits for; one that waits for nothing is."""

from __future__ import annotations

import pytest

from analyzers.hangs import analyze as hang_analysis
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.scope import Scope
from tests.analyzers.judged import judged_hangs
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def starting(
    *, at_work: tuple[int, ...] = (), until_s: float = 0.0, in_call: tuple[int, ...] = (), kind: str = "silent_work"
) -> World:
    """Two ranks before the end of their first step; `watch` sees some at work every 30 s until `until_s`."""
    world = World(ranks=2, steps=0)
    for rank in in_call:
        world.enter(rank)
    for seconds in range(30, round(until_s) + 1, 30):
        world.event(kind, float(seconds), ranks=list(at_work), cores=0.5)
    return world


def hangs(world: World, seconds: float, policy: StallPolicy = POLICY) -> bool:
    return bool(judged_hangs(world.store, policy, world.after(seconds)))


def test_a_silent_start_is_a_hang_after_its_limit() -> None:
    world = starting(in_call=(0,))
    assert not hangs(world, 170)
    assert hangs(world, 190)
    assert hangs(world, 70, stall_policy({"config": {"recovery": {"startup_s": 60.0}}}))


@pytest.mark.parametrize("kind", ["silent_work", "startup_work"])
def test_a_start_is_not_a_hang_while_its_processes_work(kind: str) -> None:
    world = starting(at_work=(1,), until_s=300, in_call=(0,), kind=kind)
    assert not hangs(world, 310)
    assert not hangs(world, 470)
    assert hangs(world, 490), "the limit counts from the last sign of work"


def test_work_in_a_collective_may_be_waiting() -> None:
    assert hangs(starting(at_work=(0,), until_s=300, in_call=(0,)), 310)


def test_a_start_at_work_has_an_upper_limit() -> None:
    world = starting(at_work=(1,), until_s=1830, in_call=(0,))
    assert not hangs(world, 1790)
    assert hangs(world, 1810)


def working(*ranks: int, until_s: float = 4.0, device: str = "cpu", phase: str = "forward") -> World:
    """Two ranks in their sixth step, in no call; `watch` sees some at work from 4 s on."""
    world = World(ranks=2, steps=5)
    for rank in world.ranks:
        world.store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 0, "world_size": 2, "device": device}])
        world.span(rank, phase)
    for seconds in [4.0, *range(30, round(until_s) + 1, 30)]:
        world.event("silent_work", float(seconds), ranks=list(ranks), idle_ranks=[], cores=1.0)
    return world


def test_work_that_a_rank_waits_for_in_a_call_extends_nothing() -> None:
    world = working(1)
    world.enter(0)
    assert hangs(world, 6)


def test_ranks_that_all_work_are_not_a_hang() -> None:
    world = working(0, 1, until_s=60)
    assert not hangs(world, 70)
    assert not hangs(world, 170), "`watch` has seen none of them idle"


def test_a_rank_that_does_not_work_is_a_hang_beside_one_that_does() -> None:
    assert hangs(working(1, until_s=60), 6)


def test_a_silence_after_work_is_a_hang() -> None:
    world = working(0, 1, until_s=60)
    world.event("silent_work", 70.0, ranks=[0], idle_ranks=[1], cores=1.0)
    assert not hangs(world, 74)
    assert hangs(world, 76)
    world.event("silent_work", 77.0, ranks=[0, 1], idle_ranks=[], cores=1.0)
    assert not hangs(world, 90)


def test_silent_work_has_an_upper_limit() -> None:
    world = working(0, 1, until_s=300)
    assert not hangs(world, 170)
    assert hangs(world, 190), "an endless loop computes, too"


@pytest.mark.parametrize(("phase", "may_wait"), [("forward", True), ("data", False)])
def test_a_host_that_may_be_waiting_for_its_device_does_not_work(phase: str, *, may_wait: bool) -> None:
    """CUDA's synchronisations spin: a stuck kernel costs CPU time."""
    world = working(0, 1, device="cuda:0", phase=phase)
    assert bool(hangs(world, 6)) == may_wait


def test_work_in_an_earlier_silence_does_not_excuse_a_later_one() -> None:
    world = World(ranks=2, steps=5)
    world.event("silent_work", -1.0, ranks=[0, 1], idle_ranks=[], cores=1.0)
    assert hangs(world, 6)


def test_a_stopped_rank_does_not_work() -> None:
    world = working(0, 1)
    world.event("rank_state", 5.0, state_rank=1, pid=1, state="stopped", os_state="T")
    assert hangs(world, 6)


def test_work_counts_alike_once_the_run_was_killed() -> None:
    world = working(0, 1, until_s=60)
    world.event("rank_exit", 70.0, exit_rank=0, pid=1, exit_code=-9, signal="SIGKILL")
    assert not judged_hangs(world.store, POLICY)


@pytest.mark.parametrize("working_ranks", [(0, 1), ()])
def test_work_until_a_request_to_stop_is_no_proof_of_progress(working_ranks: tuple[int, ...]) -> None:
    """The ranks end their step when they are interrupted, as an endless loop does on Ctrl-C."""
    world = working(*working_ranks) if working_ranks else World(ranks=2, steps=5)
    world.event("stop_requested", 60.0, signal="SIGINT", node_rank=0)
    for rank in world.ranks:
        world.span(rank, "forward", end_ns=world.after(60.1))
        world.event("rank_closed", 60.2, rank=rank)
    world.store.connection.execute("UPDATE steps SET duration_ns = 60000000000 WHERE duration_ns IS NULL")
    found = hang_analysis.hangs(world.store, Scope())
    assert [finding.status for finding in found] == ["insufficient_data"] * bool(working_ranks)
    if working_ranks:
        assert found[0].summary == (
            "Whether ranks 0 and 1 hung at step 6 is unknown: nothing was recorded for 60 s until the run was asked to "
            "stop, but processes computed or read files."
        )
