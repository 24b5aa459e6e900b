from __future__ import annotations

import json
from typing import Any

from analyzers.settings.plan_deviation import plan_deviations, planned_step_s
from tests.analyzers.memory_store import MemoryStore

SIZES = {"all_reduce": 4000, "send": 7}
PLAN = {"planned": {"rank": 0, "device": "cuda", "allocated_bytes": 3000 << 20, "bytes_per_step": SIZES}}


def store(num_bytes: int) -> MemoryStore:
    filled = MemoryStore()
    calls = [
        {"attempt": 0, "rank": rank, "step": step, "seq": step, "op": "all_reduce", "bytes": size}
        for rank in (0, 1)
        for step in range(6)
        for size in (num_bytes, num_bytes, 8)  # the last one: a loss
    ]
    filled.add("collectives", calls)
    filled.add("steps", [{"attempt": 0, "rank": 0, "step": step, "memory_bytes": 300 + step} for step in range(6)])
    for n, peak in enumerate((2000, 2715)):
        detail = json.dumps({"allocated_bytes": peak << 20})
        filled.add("events", [{"wall_ns": n, "attempt": 0, "rank": 0, "kind": "memory_peak", "detail": detail}])
    return filled


def told(source: MemoryStore, manifest: dict[str, Any]) -> dict[str, tuple[int, bool]]:
    return {each.what: (each.measured_bytes, each.as_planned) for each in plan_deviations(source, manifest)}


def test_memory_and_bytes_are_compared_with_the_plan() -> None:
    assert told(store(2000), PLAN) == {"memory": (2715 << 20, True), "all_reduce": (4000, True)}
    assert told(store(2500), PLAN)["all_reduce"] == (5000, False)


def test_memory_that_is_mostly_that_of_libraries_is_not_compared() -> None:
    small = {"planned": {**PLAN["planned"], "allocated_bytes": 1000 << 20}}
    assert "memory" not in told(store(2000), small)
    with_context = {"planned": {**PLAN["planned"], "allocated_bytes": None, "memory_bytes": 4 << 30}}
    assert "memory" not in told(store(2000), with_context), "an older plan, which has the driver's context in it"


def test_a_step_that_the_host_cannot_launch_in_its_time_is_not_compared() -> None:
    source = MemoryStore()
    assert planned_step_s(source, {"planned": {"step_s": 7e-5}, "config": {"model": {"num_layers": 4}}}) is None
    assert planned_step_s(source, {"planned": {"step_s": 0.3}, "config": {"model": {"num_layers": 32}}}) == 0.3
    staged = {"model": {"num_layers": 32}, "parallel": {"pp": 8}}
    assert planned_step_s(source, {"planned": {"step_s": 0.01}, "config": staged}) == 0.01
    assert planned_step_s(source, {"planned": {"step_s": 0.01}}) == 0.01
    assert planned_step_s(source, {}) is None


def test_a_step_on_a_shared_device_or_one_that_waits_for_its_host_is_not_compared() -> None:
    plan = {"planned": {"step_s": 0.3}}
    for uuids, late_ns, expected in ((("a", "b"), 1, 0.3), (("a", "a"), 1, None), (("a", "b"), 15, None)):
        source = MemoryStore()
        for rank, uuid in enumerate(uuids):
            place = {"attempt": 0, "rank": rank, "host": "n0", "device_uuid": uuid, "wall_ns": rank}
            source.add("ranks", [place])
            taken = {"duration_ns": 100, "forward_ns": 60, "forward_late_ns": late_ns, "stamped_steps": 1}
            source.add("steps", [{"attempt": 0, "rank": rank, "step": step, **taken} for step in range(6)])
        assert planned_step_s(source, plan) == expected


def test_a_step_on_a_device_whose_memory_is_mostly_that_of_other_jobs_is_not_compared() -> None:
    """NVML lists no process outside of the container."""
    for used_gib, expected in ((5, 0.3), (14, None)):
        source = MemoryStore()
        source.add("ranks", [{"attempt": 0, "rank": 0, "host": "n0", "device_uuid": "a", "wall_ns": 0}])
        source.add("health", [{"attempt": 0, "rank": -1, "device": "a", "memory_used_bytes": used_gib << 30}] * 3)
        source.event("memory_peak", rank=0, allocated_bytes=3 << 30)
        assert planned_step_s(source, {"planned": {"step_s": 0.3}}) == expected


def test_a_run_without_a_plan_is_not_compared() -> None:
    assert told(store(2000), {}) == {}
    assert told(store(2000), {"planned": "?"}) == {}
    wrong = {"rank": 0, "memory_bytes": "many", "bytes_per_step": {"all_reduce": -1}}
    assert told(store(2000), {"planned": wrong}) == {}


def test_memory_between_steps_is_not_compared_with_the_planned_peak() -> None:
    """After the optimizer's step no activation is held: 305 of 1,000 bytes looked like a wrong plan."""
    source = store(2000)
    source.drop("events")
    assert "memory" not in told(source, PLAN)


def test_a_missing_table_leaves_out_its_comparison() -> None:
    source = store(2000)
    source.drop("events")
    assert told(source, PLAN) == {"all_reduce": (4000, True)}
    source.drop("collectives")
    assert told(source, PLAN) == {}
