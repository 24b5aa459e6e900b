"""Corroboration of the cause by CPU time, waits for a core, garbage collections and tokens."""

from __future__ import annotations

import pytest

from analyzers.stragglers.comparison.corroboration import Counters, attribute, load_counters
from analyzers.stragglers.explain import NEXT
from analyzers.stragglers.policy import CorroborationPolicy
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import judged, stored


def attributed(cause: str = "compute", **counters: float | bool | None) -> tuple[str, str]:
    found = attribute(Counters(**counters), cause=cause, excess_ms=10.0, factor=1.5)  # type: ignore[arg-type]
    return found.cause, found.reason


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({}, ("compute", "")),  # nothing recorded decides nothing
        ({"cpu_ms": 9.5, "on_cpu": True, "run_delay_ms": 0.1}, ("compute", "")),
        ({"cpu_ms": 1.0, "on_cpu": True, "run_delay_ms": 8.0}, ("host", "core")),
        ({"cpu_ms": 3.0, "on_cpu": True, "run_delay_ms": 6.0}, ("host", "core")),  # caches are shared as well
        # Twice the work on a crowded host waits for a core twice as long.
        ({"cpu_ms": 3.0, "cpu_ratio": 0.45, "on_cpu": True, "run_delay_ms": 7.0}, ("compute", "")),
        ({"cpu_ms": 1.0, "cpu_ratio": 0.15, "on_cpu": True, "run_delay_ms": 7.0}, ("host", "core")),  # caches
        ({"cpu_ms": 9.0, "cpu_ratio": 0.5, "on_cpu": True, "gc_ms": 8.0}, ("host", "gc")),
        ({"cpu_ms": 9.0, "cpu_ratio": 0.5, "on_cpu": True, "tokens_ratio": 0.5}, ("sequence_length", "")),
        ({"cpu_ms": 10.0, "on_cpu": True, "gc_ms": 9.0}, ("host", "gc")),  # which is CPU time, too
        ({"cpu_ms": 0.2, "on_cpu": True, "run_delay_ms": 0.1, "major_faults": 40.0}, ("host", "paging")),
        ({"cpu_ms": 0.2, "on_cpu": True, "run_delay_ms": 0.1, "major_faults": 0.0}, ("host", "blocked")),
        ({"cpu_ms": 1.0, "on_cpu": True, "run_delay_ms": 4.5}, ("host", "core")),  # hardly idle
        ({"cpu_ms": 0.2, "on_cpu": True}, ("host", "kept")),  # of an older recorder
        ({"cpu_ms": 0.2, "on_cpu": False}, ("compute", "")),  # a GPU computes without the host's CPU
        ({"run_delay_ms": 8.0, "on_cpu": False}, ("host", "core")),
        ({"cpu_ms": 10.0, "on_cpu": True, "tokens_ratio": 0.5}, ("sequence_length", "")),
        ({"cpu_ms": 10.0, "on_cpu": True, "tokens_ratio": 0.05}, ("compute", "")),
    ],
)
def test_counters_attribute_slow_computing(counters: dict[str, float], expected: tuple[str, str]) -> None:
    assert attributed(**counters) == expected


@pytest.mark.parametrize(
    ("own_run_delay_ms", "cpu_ratio", "expected"),
    [
        (107.0, 0.8, "compute"),  # its peers wait as long per millisecond of work
        (107.0, 0.2, "host"),  # its work explains a sixth of the wait
        (107.0, None, "host"),  # nothing is known of its work
        (900.0, 0.2, "compute"),  # all wait that long: a sixth is more than its excess
    ],
)
def test_a_rank_that_computes_more_waits_for_a_core_more(
    own_run_delay_ms: float, cpu_ratio: float | None, expected: str
) -> None:
    """As recorded of `slow_compute` on one of four ranks, on two cores that other jobs use: most of the excess is a
    wait, and the wall clock shows a larger factor than the CPU time."""
    counters = Counters(
        cpu_ms=15.0, cpu_ratio=cpu_ratio, run_delay_ms=87.0, own_run_delay_ms=own_run_delay_ms, on_cpu=True
    )
    assert attribute(counters, cause="compute", excess_ms=91.4, factor=2.69).cause == expected


@pytest.mark.parametrize(("cpu_ratio", "is_kept"), [(2.0, True), (0.5, False)])
def test_twice_the_work_is_not_a_crowded_machine(cpu_ratio: float, is_kept: bool) -> None:
    """As recorded of a busy forward pass for 9 s, on two cores that thirty processes wanted."""
    policy = CorroborationPolicy()
    counters = Counters(
        cpu_ms=20.0, cpu_ratio=cpu_ratio, run_delay_ms=24.0, own_run_delay_ms=60.0, usual_core_wait_ratio=3.0,
        slow_s=9.2, on_cpu=True,
    )  # fmt: skip
    found = attribute(counters, cause="compute", excess_ms=40.0, factor=9.0)
    assert not counters.has_own_core(policy)
    assert (not found.is_waiting) == is_kept


def test_a_loader_that_waits_for_its_disk_is_data_and_one_without_a_core_is_host() -> None:
    assert attributed("data", cpu_ms=0.1, on_cpu=True, run_delay_ms=0.2) == ("data", "")
    assert attributed("data", cpu_ms=0.1, on_cpu=True, run_delay_ms=9.0) == ("host", "core")


def counted(seed: int, *, cause: str = "compute", **of_rank: str) -> MemoryStore:
    """Rank 3 is 1.5 times as slow from step 60 on; `of_rank`: what its host says then, SQL over its row."""
    store = stored(simulate(seed, steps=120, machine="busy", faults=[Slow(rank=3, step=60, factor=1.5, cause=cause)]))
    store.add("ranks", [{"attempt": 0, "rank": rank, "device": "cpu", "wall_ns": 1} for rank in range(4)])
    own = "(forward_ns + backward_ns - backward_wait_ns + optimizer_ns)"
    store.connection.execute(f"UPDATE steps SET cpu_ns = {own}, run_delay_ns = 100000, gc_ns = 0, major_faults = 0")
    settings = ", ".join(f"{name} = {value}" for name, value in of_rank.items())
    if settings:
        store.connection.execute(f"UPDATE steps SET {settings} WHERE rank = 3 AND step >= 60")
    return store


def test_a_rank_that_computes_more_is_slow_in_computing() -> None:
    (finding,) = judged(counted(20))
    assert (finding.ranks, finding.cause) == ((3,), "compute")
    assert finding.evidence["cpu_time_excess_ms"] == pytest.approx(finding.evidence["excess_ms"], rel=0.2)


def test_a_rank_without_its_core_is_not_a_bad_device() -> None:
    (finding,) = judged(counted(21, cpu_ns="cpu_ns / 1.5", run_delay_ns="cpu_ns / 3"))
    assert (finding.ranks, finding.cause, finding.advice) == ((3,), "host", "straggler-host")
    assert "waits for a core" in finding.summary
    assert finding.evidence["core_wait_excess_ms"] > 10


def test_what_all_ranks_wait_for_a_core_in_other_steps_is_known() -> None:
    store = counted(21, cpu_ns="10000000", run_delay_ns="8000000")
    store.connection.execute("UPDATE steps SET cpu_ns = 10000000, run_delay_ns = 6000000 WHERE step < 60")
    counters = load_counters(store, 0, (3, [(60, 119)]), [0, 1, 2], judged=(6, 119))
    assert counters.usual_run_delay_ms == pytest.approx(6.0)
    assert counters.usual_core_wait_ratio == pytest.approx(0.6)
    ((slow_s,),) = store.rows("SELECT sum(duration_ns) / 1e9 FROM steps WHERE rank = 3 AND step BETWEEN 60 AND 119")
    assert counters.slow_s == pytest.approx(slow_s)
    mostly_slow = load_counters(store, 0, (3, [(10, 59)]), [0, 1, 2], judged=(6, 59))
    assert mostly_slow.usual_run_delay_ms is None
    assert mostly_slow.usual_core_wait_ratio == pytest.approx(0.6)  # of the peers meanwhile


def test_steps_between_two_slow_stretches_are_usual_ones() -> None:
    """As recorded on a crowded machine: slow for 40 of 120 steps, and waits for a core in just those."""
    store = counted(21, cpu_ns="10000000")
    store.connection.execute("UPDATE steps SET run_delay_ns = 6000000")
    store.connection.execute("UPDATE steps SET run_delay_ns = 1000000 WHERE rank < 3 AND step NOT BETWEEN 20 AND 99")
    counters = load_counters(store, 0, (3, [(6, 19), (100, 119)]), [0, 1, 2], judged=(6, 119))
    assert counters.run_delay_ms == pytest.approx(5.0)
    assert counters.usual_run_delay_ms == pytest.approx(6.0)
    assert load_counters(store, 0, (3, [(6, 119)]), [0, 1, 2]).run_delay_ms == pytest.approx(0.0)


def test_slow_in_everything_because_of_the_host_is_one_finding() -> None:
    store = stored(
        simulate(
            22,
            steps=120,
            faults=[Slow(rank=2, step=60, factor=1.4), Slow(rank=2, step=60, factor=1.4, cause="data")],
        )
    )
    store.connection.execute("UPDATE steps SET run_delay_ns = CASE WHEN rank = 2 AND step >= 60 THEN 30e6 ELSE 0 END")
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause) == ((2,), "host")


def test_longer_sequences_are_no_bad_machine() -> None:
    (finding,) = judged(counted(23, tokens="6000"))
    assert finding.cause == "compute"  # of the others nothing is known
    store = counted(23)
    store.connection.execute("UPDATE steps SET tokens = CASE WHEN rank = 3 AND step >= 60 THEN 6000 ELSE 4000 END")
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause) == ((3,), "sequence_length")
    assert finding.evidence["tokens_excess_ratio"] == pytest.approx(0.5)


def test_a_store_of_an_older_recorder_gives_no_false_cause() -> None:
    store = counted(24)
    store.connection.execute("UPDATE steps SET run_delay_ns = NULL, major_faults = NULL, cpu_ns = NULL, gc_ns = NULL")
    (finding,) = judged(store)
    assert finding.cause == "compute"
    assert "cpu_time_excess_ms" not in finding.evidence
    assert load_counters(store, 0, (3, [(60, 119)]), [0, 1, 2]).cpu_ms is None


def on_shared_cores(seed: int, *, wait_ms: float, excess_wait_ms: float, cpu_growth: float) -> MemoryStore:
    """Rank 3 is slower from step 60 on. Each rank waits `wait_ms` a step for its core; rank 3 so much more then, and it
    takes `cpu_growth` more CPU time, as the caches that another job shares make it."""
    store = counted(seed, cpu_ns=f"cpu_ns * {1 + cpu_growth} / 1.5")
    store.connection.execute(f"UPDATE steps SET run_delay_ns = {int(wait_ms * 1e6)}")
    store.connection.execute(
        f"UPDATE steps SET run_delay_ns = {int((wait_ms + excess_wait_ms) * 1e6)} WHERE rank = 3 AND step >= 60"
    )
    return store


@pytest.mark.parametrize("cpu_growth", [0.0, 0.05, 0.1])
def test_a_healthy_rank_that_shares_its_core_is_told_to_wait_for_it(cpu_growth: float) -> None:
    """A quiet machine, and one other job on the rank's core: its recorded wait explains the excess."""
    store = on_shared_cores(31, wait_ms=0.1, excess_wait_ms=35.0, cpu_growth=cpu_growth)
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause) == ((3,), "host")
    assert "waits for a core that another process uses" in finding.summary


@pytest.mark.parametrize(
    ("excess_wait_ms", "cpu_growth"), [(35.0, 0.02), (4.0, 0.01), (-1.5, 0.09), (20.0, 0.11)],
    ids=["waits", "its-median-wait-shows-little", "caches", "both"],
)  # fmt: skip
def test_a_small_excess_on_a_crowded_machine_blames_no_rank(excess_wait_ms: float, cpu_growth: float) -> None:
    """As recorded of healthy ranks on two cores with a load of 12 to 18: 10 to 39 ms more work over 20 steps, and three
    times the CPU time waited for a core."""
    assert judged(on_shared_cores(31, wait_ms=300.0, excess_wait_ms=excess_wait_ms, cpu_growth=cpu_growth)) == []


def test_a_rank_that_computes_half_as_much_again_is_named_on_a_crowded_machine() -> None:
    (finding,) = judged(on_shared_cores(31, wait_ms=300.0, excess_wait_ms=10.0, cpu_growth=0.5))
    assert (finding.ranks, finding.cause) == ((3,), "compute")


def test_a_rank_that_sleeps_for_longer_than_ranks_wait_is_named_on_a_crowded_machine() -> None:
    (finding,) = judged(on_shared_cores(31, wait_ms=60.0, excess_wait_ms=0.0, cpu_growth=0.0))
    assert (finding.ranks, finding.cause) == ((3,), "host")
    assert "idle off-CPU" in finding.summary


@pytest.mark.parametrize(
    ("waited_ms", "said"),
    [
        (5.5, "Of the extra time, 4 ms is CPU time and 5.5 ms is waiting for a core."),
        (12.0, "Of the extra time, 2.5 ms is CPU time and 7.5 ms is waiting for a core."),  # they add up to 10
        (4.0, ""),
        (None, ""),
    ],
)
def test_an_excess_that_is_mostly_waiting_for_a_core_is_not_compute_alone(waited_ms: float | None, said: str) -> None:
    counters = Counters(cpu_ms=4.0, run_delay_ms=waited_ms, on_cpu=True)
    assert counters.waiting_part(10.0) == said
    assert Counters(cpu_ms=4.0, run_delay_ms=waited_ms, on_cpu=False).waiting_part(10.0) == ""
    assert Counters(cpu_ms=-1.0, run_delay_ms=12.0, on_cpu=True).waiting_part(10.0) == (
        "Of the extra time, 10 ms is waiting for a core."
    )


def test_more_work_that_mostly_waits_for_a_core_is_reported_in_both_parts() -> None:
    (finding,) = judged(on_shared_cores(31, wait_ms=60.0, excess_wait_ms=60.0, cpu_growth=0.5))
    assert (finding.ranks, finding.cause) == ((3,), "compute")
    assert "of compute" not in finding.summary
    assert "Of the extra time," in finding.summary
    parts = finding.evidence["cpu_time_excess_ms"] + finding.evidence["core_wait_excess_ms"]
    assert 0 < parts <= finding.evidence["excess_ms"] + 0.01
    names = list(finding.evidence)
    assert names.index("core_wait_excess_ms") < names.index("peers_wait_more_ms")
    assert NEXT["straggler"](finding).startswith("Give the host of rank 3 more cores")


@pytest.mark.parametrize("cpu_ms", [9.0, 12.0])
def test_a_rank_that_waits_less_for_a_core_has_no_extra_wait(cpu_ms: float) -> None:
    parts = Counters(cpu_ms=cpu_ms, run_delay_ms=-2.11, gc_ms=-1.0, tokens_ratio=-0.1, on_cpu=True).within(9.5)
    assert parts.evidence() == {"cpu_time_excess_ms": min(cpu_ms, 9.5)}


def test_more_work_alone_is_compute() -> None:
    (finding,) = judged(on_shared_cores(31, wait_ms=0.1, excess_wait_ms=0.0, cpu_growth=0.5))
    assert "ms of compute per step" in finding.summary
    assert NEXT["straggler"](finding).startswith("Check clocks")
