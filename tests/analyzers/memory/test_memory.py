from __future__ import annotations

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.memory.analyze import growth, memory_use
from analyzers.memory.policy import MemoryPolicy
from analyzers.scope import Scope
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import plain_run

GIB = 1 << 30


def analyze(store: MemoryStore) -> list[Finding]:
    return checked(memory_use(store, Scope()))


def host_memory(store: MemoryStore, used: int, total: int, device: str = "host") -> None:
    row = {"attempt": 0, "rank": -1, "sample_ns": 10**15, "node": "node-0", "device": device}
    store.add("health", [row | {"memory_used_bytes": used, "memory_total_bytes": total}])


def leaking(where: str = "true", mib_a_step: float = 4) -> MemoryStore:
    store = plain_run(steps=200)
    store.connection.execute(
        f"UPDATE steps SET memory_bytes = memory_bytes + CAST(step * {mib_a_step} * 1048576 AS BIGINT) WHERE {where}"
    )
    return store


def fired(store: MemoryStore) -> list[Finding]:
    return [finding for finding in analyze(store) if finding.status == "fired"]


def test_a_leak_with_its_slope_and_the_time_that_is_left() -> None:
    store = leaking("rank = 2")
    host_memory(store, used=60 * GIB, total=64 * GIB)
    (finding,) = fired(store)
    assert (finding.kind, finding.cause, finding.ranks) == ("memory_growth", "leak", (2,))
    assert finding.evidence["growth_per_step_bytes"] == pytest.approx(4 << 20, rel=0.02)
    assert finding.evidence["steps_to_out_of_memory"] == pytest.approx(1024, rel=0.02)
    assert finding.evidence["time_to_out_of_memory_s"] == pytest.approx(102.4, rel=0.02)
    assert "Out of memory in 10" in finding.summary


def test_ranks_of_one_host_run_out_together() -> None:
    store = leaking()
    host_memory(store, used=60 * GIB, total=64 * GIB)
    (finding,) = fired(store)
    assert finding.ranks == ()
    assert finding.evidence["steps_to_out_of_memory"] == pytest.approx(256, rel=0.02)


def test_without_host_readings_only_the_slope_is_reported() -> None:
    (finding,) = fired(leaking())
    assert finding.evidence["steps_to_out_of_memory"] is None
    assert finding.summary.endswith("at the end).")


def test_caches_that_fill_up_and_single_jumps_are_no_leak() -> None:
    policy, step = MemoryPolicy(), np.arange(1.0, 301.0)
    noise = np.random.default_rng(0).integers(0, 1 << 20, 300)
    assert growth(step, GIB + 0.5 * GIB * (1 - np.exp(-step / 50)) + noise, policy) is None
    assert growth(step, GIB + 0.5 * GIB * (step > 150) + noise, policy) is None
    assert growth(step, GIB + 5e4 * step + noise, policy) is None
    leak = growth(step, GIB + 2e6 * step + 0.3 * GIB * (step > 150) + noise, policy)
    assert leak is not None
    assert fired(plain_run()) == []


def test_steps_that_come_again_count_as_often_as_they_were_taken() -> None:
    """Seven rollbacks of twenty steps each: the last ones are taken again and again, and memory grows all the while."""
    taken = np.arange(240.0)
    step = np.where(taken < 100, taken, 80 + (taken - 100) % 20)
    with np.errstate(all="raise"):
        leak = growth(step, GIB + 2e6 * taken, MemoryPolicy())
    assert leak is not None
    assert leak.per_step == pytest.approx(2e6, rel=0.01)


def test_a_host_near_its_limit_is_a_warning() -> None:
    host_memory(store := plain_run(), used=79 * GIB, total=80 * GIB)
    (finding,) = fired(store)
    assert (finding.kind, finding.cause, finding.severity) == ("memory_limit", "host", "warning")
    host_memory(other := plain_run(), used=20 * GIB, total=80 * GIB)
    assert fired(other) == []


def full_device() -> MemoryStore:
    store = plain_run()
    store.connection.execute("UPDATE ranks SET device_uuid = 'GPU-' || rank")
    host_memory(store, used=79 * GIB, total=80 * GIB, device="GPU-1")
    return store


def test_a_device_that_is_full_of_cache_is_advice_only() -> None:
    (finding,) = [found for found in analyze(full_device()) if found.kind == "memory_limit"]
    assert (finding.status, finding.cause, finding.ranks) == ("advice", "device", (1,))


@pytest.mark.parametrize(("times", "warned"), [(2, False), (3, True)])
def test_an_allocator_that_retries_again_and_again_is_a_warning(times: int, warned: bool) -> None:
    store = full_device()
    held = {"allocated_bytes": 70 * GIB, "reserved_bytes": 78 * GIB}
    for step in range(10, 10 + times):
        store.event("allocation_retries", attempt=0, rank=1, step=step, num_retries=2, **held)
    limits = [found for found in analyze(store) if found.kind == "memory_limit"]
    if not warned:
        assert [found.status for found in limits] == ["advice"]
        return
    (finding,) = limits
    assert (finding.status, finding.cause, finding.ranks, finding.first_step) == ("fired", "allocator", (1,), 10)
    assert finding.evidence["num_retries"] == 6


def test_a_rank_that_holds_more_than_its_peers() -> None:
    store = plain_run(steps=200)
    store.connection.execute(f"UPDATE steps SET memory_bytes = {4 * GIB} WHERE rank = 1")
    (finding,) = analyze(store)
    assert (finding.kind, finding.status, finding.ranks) == ("memory_imbalance", "advice", (1,))
    store.connection.execute("UPDATE ranks SET pp = rank")
    assert analyze(store) == [], "another stage holds other layers"


def test_a_young_run_that_fills_its_allocators_is_not_judged() -> None:
    """A healthy mixture of experts grew from 365 to 461 MiB in 60 steps, and no more in the 180 after them."""
    store = plain_run(steps=60)
    store.connection.execute(f"UPDATE steps SET memory_bytes = {365 * 2**20} + step * 1677722")
    (finding,) = analyze(store)
    assert finding.status == "insufficient_data"
    assert "200 steps" in finding.summary


def test_missing_records_are_reported() -> None:
    for damage in ("DELETE FROM steps", "UPDATE steps SET memory_bytes = NULL", "DELETE FROM steps WHERE step > 20"):
        store = plain_run()
        store.connection.execute(damage)
        (finding,) = analyze(store)
        assert (finding.status, finding.kind) == ("insufficient_data", "memory_growth"), damage
