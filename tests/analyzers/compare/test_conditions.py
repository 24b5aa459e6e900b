"""What differs between two runs that no setting names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from analyzers.compare.conditions import Run, conditions, load_caveat
from analyzers.stragglers.throughput import Change
from tests.analyzers.memory_store import MemoryStore

S = 10**9


def run(*, load: float | None, ranks: int = 2, host: str = "gpu-01", memory: int = 2**30) -> Run:
    store = MemoryStore()
    store.add(
        "steps",
        [{"attempt": 0, "rank": rank, "step": 1, "start_ns": S, "duration_ns": S, "memory_bytes": memory}
         for rank in range(ranks)],
    )  # fmt: skip
    store.add(
        "ranks", [{"attempt": 0, "rank": r, "host": host, "device": f"cuda:{r}", "wall_ns": 0} for r in range(ranks)]
    )
    if load is not None:
        reading: dict[str, Any] = {"node": host, "device": "host", "num_cpus": 4}
        within, outside = {"sample_ns": S + 5, "load_1m": 4 * load}, {"sample_ns": 9 * S, "load_1m": 400.0}
        store.add("health", [reading | within, reading | outside])
    return Run(source=store, facts={"num_ranks": ranks, "mesh": {"dp_shard": ranks}}, times=None)


def test_equal_runs_differ_in_nothing_but_both_loads_are_shown() -> None:
    assert conditions(run(load=0.5), run(load=0.5)) == (("host load per CPU", "0.50", "0.50"),)


def test_ranks_hosts_load_and_memory_stand_side_by_side() -> None:
    found = conditions(run(load=0.5), run(load=3.0, ranks=4, host="gpu-02", memory=2**31))
    assert found == (
        ("ranks", "2", "4"), ("mesh", "dp_shard 2", "dp_shard 4"), ("hosts", "gpu-01", "gpu-02"),
        ("host load per CPU", "0.50", "3.00"), ("largest memory of a rank (MiB)", "1,024", "2,048"),
    )  # fmt: skip


def test_what_one_run_did_not_record_is_not_zero() -> None:
    assert conditions(run(load=None), run(load=1.0)) == (("host load per CPU", None, "1.00"),)
    attached = replace(run(load=1.0), facts={"num_ranks": 2, "mesh": {}})
    assert ("mesh", None, "dp_shard 2") in conditions(attached, run(load=1.0))


@pytest.mark.parametrize(
    ("ratio", "loads", "is_caveat"),
    [
        (0.7, (3.0, 1.0), True),  # the second is faster, and the first had the busier host
        (1.4, (1.0, 3.0), True),
        (0.7, (1.0, 3.0), False),  # faster on the busier host
        (0.7, (3.0, 2.0), False),
        (0.7, (0.6, 0.1), False),  # nothing waits below one process per CPU
        (1.0, (3.0, 1.0), False),
        (0.7, (None, 1.0), False),
    ],
)
def test_a_busier_host_of_the_slower_run_may_be_why(
    ratio: float, loads: tuple[float | None, float | None], is_caveat: bool
) -> None:
    low, high = ratio - 0.05, ratio + 0.05
    speed = Change(ratio=ratio, low=low, high=high, per_token=True, ms_before=100.0, ms_after=100 * ratio)
    a, b = (run(load=load) for load in loads)
    assert bool(load_caveat(speed, a, b)) is is_caveat
    assert load_caveat(speed, a, replace(b, facts=b.facts | {"num_ranks": 4})) == ""
    assert load_caveat(None, a, b) == ""
