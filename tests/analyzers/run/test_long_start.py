"""A start that compiles for minutes is no hang while a process is at work, and one that waits for nothing is."""

from __future__ import annotations

from analyzers.run.policy import StallPolicy, stall_policy
from tests.analyzers.judged import judged_hangs
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def starting(*, at_work: tuple[int, ...] = (), until_s: float = 0.0, in_call: tuple[int, ...] = ()) -> World:
    """Two ranks before the end of their first step; `watch` sees some at work every 30 s until `until_s`."""
    world = World(ranks=2, steps=0)
    for rank in in_call:
        world.enter(rank)
    for seconds in range(30, round(until_s) + 1, 30):
        world.event("startup_work", float(seconds), ranks=list(at_work), cores=0.5)
    return world


def hangs(world: World, seconds: float, policy: StallPolicy = POLICY) -> bool:
    return bool(judged_hangs(world.store, policy, world.after(seconds)))


def test_a_silent_start_is_a_hang_after_its_limit() -> None:
    world = starting(in_call=(0,))
    assert not hangs(world, 170)
    assert hangs(world, 190)
    assert hangs(world, 70, stall_policy({"config": {"recovery": {"startup_s": 60.0}}}))


def test_a_start_at_work_is_none_while_it_works() -> None:
    world = starting(at_work=(1,), until_s=300, in_call=(0,))
    assert not hangs(world, 310)
    assert not hangs(world, 470)
    assert hangs(world, 490), "the limit counts from the last sign of work"


def test_work_in_a_collective_may_be_waiting() -> None:
    assert hangs(starting(at_work=(0,), until_s=300, in_call=(0,)), 310)


def test_no_start_takes_for_ever() -> None:
    world = starting(at_work=(1,), until_s=1830, in_call=(0,))
    assert not hangs(world, 1790)
    assert hangs(world, 1810)


def test_work_after_the_first_step_changes_nothing() -> None:
    world = World(ranks=2, steps=5)
    world.enter(0)
    world.event("startup_work", 5.0, ranks=[1], cores=1.0)
    assert hangs(world, 7)
