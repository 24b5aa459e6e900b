from __future__ import annotations

import pytest

from analyzers import hang
from analyzers.finding import Finding
from analyzers.rank_lost import analyze
from analyzers.stall import StallPolicy
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def lost(world: World, now_ns: int | None = None) -> list[Finding]:
    assert hang.analyze(world.store, POLICY, now_ns) == []
    return analyze(world.store, POLICY, now_ns)


def killed(rank: int = 2, name: str = "SIGKILL", code: int = -9) -> World:
    """A rank dies of a signal; the others' collectives break."""
    world = World()
    for other in set(world.ranks) - {rank}:
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="RuntimeError",
                    message="[pair.cc:500] Connection closed by peer [127.0.0.1]:9")  # fmt: skip
    world.event("rank_exit", 0.1, exit_rank=rank, exit_code=code, signal=name, pid=7, message="")
    return world


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGABRT", -6)])
def test_a_signal_names_its_rank_and_the_others_are_victims(name: str, code: int) -> None:
    (finding,) = lost(killed(2, name, code))
    assert (finding.kind, finding.cause, finding.ranks) == ("rank_lost", "signal", (2,))
    assert finding.evidence["victims"] == [0, 1, 3]
    assert name in finding.summary
    assert finding.severity == "critical"


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


def test_the_same_exception_everywhere_is_one_finding() -> None:
    world = World()
    for rank in range(4):
        world.event("exception", 0.1, rank=rank, type="KeyError", message="'lr'")
    (finding,) = lost(world)
    assert finding.ranks == (0, 1, 2, 3)
    assert "victims" not in finding.summary


def test_watch_alone_saw_it() -> None:
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
    assert (finding.cause, finding.ranks) == ("killed_all", (0, 1, 2, 3))
    assert "killed from outside at step 16" in finding.summary


def test_a_run_that_may_be_alive_is_not_declared_dead() -> None:
    world = World()
    assert lost(world, world.after(0.5)) == []


def test_the_agents_sigterm_to_all_is_a_termination() -> None:
    world = World()
    for rank in range(4):
        world.event("rank_exit", 0.1, exit_rank=rank, exit_code=-15, signal="SIGTERM", pid=1, message="")
    (finding,) = lost(world)
    assert "terminated from outside" in finding.summary


def test_a_past_attempts_death_counts_and_says_how_it_went_on() -> None:
    world = killed(2)
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(5))
    world.store.event("run_ended", attempt=1, wall_ns=world.after(60), reason="finished", exit_code=0)
    (finding,) = lost(world)
    assert (finding.attempt, finding.ranks, finding.severity) == (0, (2,), "warning")
    assert "restarted as attempt 1, resumed at step 11" in finding.summary


def test_clocks_of_two_nodes_that_disagree_change_nothing() -> None:
    world = World(clock_offset_ns={2: 600 * 10**9, 3: 600 * 10**9})
    for other in (0, 2, 3):
        world.enter(other)
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=7, message="")
    (finding,) = lost(world)
    assert finding.ranks == (1,)


def test_missing_events_are_said() -> None:
    world = World()
    world.store.drop("events")
    assert [f.status for f in analyze(world.store, POLICY)] == ["insufficient_data"]  # not: everybody was killed
    world.store.drop("steps")
    assert [f.status for f in analyze(world.store, POLICY)] == ["insufficient_data"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("MemoryError", ""),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes",
        ),
    ],
)
def test_a_refused_allocation_is_out_of_memory_with_its_history(error: str, message: str) -> None:
    world = World()
    world.event("exception", 0.01, rank=1, type=error, message=message)
    for other in (0, 2, 3):
        world.enter(other)
        world.event("exception", 0.05, rank=other, type="RuntimeError", message="Connection closed by peer")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (1,))
    assert finding.advice == "rank-lost-out_of_memory"
    assert finding.evidence.keys() >= {"memory_first_bytes", "memory_last_bytes", "memory_of_peers_bytes"}


def test_sigkill_is_out_of_memory_only_where_the_kernel_counted_one() -> None:
    world = World()
    world.event("rank_exit", 0.1, exit_rank=2, exit_code=-9, signal="SIGKILL", pid=7, message="",
                out_of_memory="memory limit of the control group")  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (2,))
    assert "memory limit of the control group exhausted" in finding.summary
    assert lost(killed(2))[0].cause == "signal"
