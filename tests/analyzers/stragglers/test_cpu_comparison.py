"""Where neighbours drown the wall clock, the CPU time of the ranks is compared, and said so."""

from __future__ import annotations

import pytest

from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.stragglers.test_corroboration import counted
from tests.analyzers.stragglers.test_straggler import judged
from tests.depth import tried

CROWDED = """
UPDATE steps SET forward_ns = forward_ns + delay, duration_ns = duration_ns + delay, run_delay_ns = delay + 3 * cpu_ns
FROM (SELECT rank AS of_rank, step AS of_step,
             CAST(if(hash(rank, step, {seed}) % 3 = 0, 0, hash(step, rank, {seed}) % 900) * 1000000 AS BIGINT) AS delay
      FROM steps) AS neighbours
WHERE rank = of_rank AND step = of_step
"""
"""Endless loops take the cores: each step of each rank is delayed by up to 0.9 s."""


def crowded(seed: int, **of_rank: str) -> MemoryStore:
    store = counted(seed, **of_rank)
    store.connection.execute(CROWDED.format(seed=seed))
    return store


@pytest.mark.parametrize("seed", range(tried(3, nightly=8)))
def test_a_rank_that_works_more_is_named_by_its_cpu_time(seed: int) -> None:
    (finding,) = judged(crowded(seed))
    assert (finding.ranks, finding.cause, finding.evidence["measured_by"]) == ((3,), "compute", "CPU time")
    assert abs((finding.first_step or 0) - 60) <= 1
    assert finding.evidence["factor_ratio"] == pytest.approx(1.5, abs=0.15)
    assert "of CPU time per step" in finding.summary
    assert "Other processes use the cores" in finding.summary


def test_a_rank_that_works_more_in_two_episodes_is_named_with_both() -> None:
    """As recorded of a loop of four ranks on two busy cores: more work in steps 60 to 84, and again from step 98 on."""
    store = crowded(2)
    store.connection.execute("UPDATE steps SET cpu_ns = cpu_ns / 1.5 WHERE rank = 3 AND step BETWEEN 85 AND 97")
    (finding,) = judged(store)
    assert (finding.ranks, finding.evidence["measured_by"], finding.evidence["episodes"]) == ((3,), "CPU time", 2)
    assert abs((finding.first_step or 0) - 60) <= 1
    assert finding.evidence["ongoing"]


def test_more_work_explains_why_a_rank_also_waits_longer_for_a_core() -> None:
    """As in the demo beside four endless loops: the wait shows in wall time, and begins to show late."""
    store = crowded(1)
    waits = ", ".join(f"{column} = {column} + 1500000000" for column in ("forward_ns", "duration_ns", "run_delay_ns"))
    store.connection.execute(f"UPDATE steps SET {waits} WHERE rank = 3 AND step >= 80")
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause, finding.evidence["measured_by"]) == ((3,), "compute", "CPU time")
    assert abs((finding.first_step or 0) - 60) <= 1


def test_steps_that_ran_again_after_a_rollback_are_told_apart() -> None:
    """As in the demo, which rolls back before its rank is slow; one step lacks its CPU time."""
    store = crowded(5)
    store.connection.execute("UPDATE steps SET step = step - 10 WHERE step >= 40")
    store.connection.execute("UPDATE steps SET cpu_ns = NULL WHERE rank = 1 AND step = 70")
    (finding,) = judged(store)
    assert (finding.ranks, finding.evidence["measured_by"]) == ((3,), "CPU time")
    assert abs((finding.first_step or 0) - 50) <= 1


@pytest.mark.parametrize("seed", range(tried(3, nightly=8)))
def test_ranks_that_work_the_same_are_not(seed: int) -> None:
    assert judged(crowded(seed, cpu_ns="cpu_ns / 1.5")) == []


@pytest.mark.parametrize("seed", range(tried(2, nightly=4)))
def test_a_few_milliseconds_more_in_short_steps_are_no_work(seed: int) -> None:
    """As on two cores with 25 processes: caches are lost whenever another process runs."""
    store = crowded(seed)
    store.connection.execute("UPDATE steps SET cpu_ns = CAST(cpu_ns / 20 AS BIGINT)")
    assert judged(store) == []


def test_a_rank_that_polls_while_it_waits_does_not_work_more() -> None:
    store = crowded(1, cpu_ns="cpu_ns / 1.5")
    polls = "collective_wait_ns = collective_wait_ns + 50000000, cpu_ns = cpu_ns * 2"
    store.connection.execute(f"UPDATE steps SET {polls} WHERE rank = 2 AND step >= 60")
    assert judged(store) == []


def test_on_a_machine_with_cores_to_spare_the_wall_clock_counts() -> None:
    store = counted(3, cpu_ns="cpu_ns * 2")
    (finding,) = explained(judged(store))
    assert "measured_by" not in finding.evidence
