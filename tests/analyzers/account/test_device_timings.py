"""Waiting and own work of ranks on devices, from the durations of their calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from analyzers.account.device.device_timings import device_rows
from analyzers.account.device.measured_by import has_device_calls
from analyzers.account.timings import load_timings
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
STEP_MS = 100


def run_of(
    calls: list[tuple[str, dict[int, tuple[float, float]]]],
    *,
    op: str = "all_reduce",
    steps: int = 3,
    wait_ns: int | None = None,
    loading_ms: dict[int, float] | None = None,
) -> MemoryStore:
    """Steps of 100 ms; in each the calls (group, {rank: (begin, end) in ms})."""
    store = MemoryStore()
    ranks = sorted({rank for _, times in calls for rank in times})
    identity = {"attempt": 0, "device": "cuda:0", "wall_ns": 0, "world_size": len(ranks)}
    store.add("ranks", [identity | {"rank": rank} for rank in ranks])
    store.add(
        "nccl_groups", [{"attempt": 0, "rank": rank, "communicator": 0, "process_group": "dp:0"} for rank in ranks]
    )
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        begin = step * STEP_MS * MS
        for number, (group, times) in enumerate(calls):
            rows += [
                {
                    "attempt": 0, "rank": rank, "step": step, "seq": step * len(calls) + number, "op": op,
                    "process_group": group, "issue_ns": begin + int(start * MS), "end_ns": begin + int(end * MS),
                    "wait_ns": wait_ns,
                }
                for rank, (start, end) in times.items()
            ]  # fmt: skip
        for rank in ranks:
            loading = int((loading_ms or {}).get(rank, 0.0) * MS)
            times_of = {"start_ns": begin, "duration_ns": STEP_MS * MS, "data_ns": loading}
            store.add("steps", [{"attempt": 0, "rank": rank, "step": step, **times_of}])
    store.add("collectives", rows)
    return store


def waits(store: MemoryStore) -> dict[int, float]:
    table = device_rows(store, 0)
    return {int(rank): round(float(wait), 3) for rank, wait in zip(table["rank"], table["wait"], strict=True)}


def test_the_shortest_duration_is_the_transfer_and_more_is_waiting() -> None:
    assert waits(run_of([("dp:0-2", {0: (10, 45), 1: (20, 45), 2: (40, 45)})])) == {0: 30, 1: 20, 2: 0}


def test_a_kernel_queued_before_the_last_rank_enters_counts_as_waiting() -> None:
    """It starts when the previous call of its group ends, and spins."""
    calls = [("dp:0-1", {0: (10, 15), 1: (10, 15)}), ("dp:0-1", {0: (15, 90), 1: (85, 90)})]
    assert waits(run_of(calls)) == {0: 70, 1: 0}


def test_kernels_queued_by_all_ranks_do_not_count_as_waiting() -> None:
    """They start together; their ends are seen at different times."""
    calls = [("dp:0-1", {0: (10, 45), 1: (40, 45)}), ("dp:0-1", {0: (45, 90), 1: (45, 50)})]
    assert waits(run_of(calls)) == {0: 30, 1: 0}


def test_calls_awaited_immediately_count_in_full_as_waiting() -> None:
    calls = [("tp:0-1", {0: (10, 25), 1: (20, 25)}), ("tp:0-1", {0: (40, 60), 1: (50, 60)})]
    assert waits(run_of(calls)) == {0: 35, 1: 15}


def test_the_first_gather_of_a_step_is_waited_for() -> None:
    """Nothing can be computed before it; what is gathered later is gathered while its rank computes."""
    calls = [
        ("dp_shard:0-1", {0: (10, 25), 1: (20, 25)}),
        ("dp_shard:0-1", {0: (40, 50), 1: (45, 50)}),
        ("dp_shard:0-1", {0: (60, 82), 1: (80, 82)}),
    ]
    assert waits(run_of(calls, op="all_gather")) == {0: 15 + 20, 1: 5}
    assert waits(run_of(calls, op="all_reduce")) == {0: 20, 1: 0}


def test_a_sender_waits_for_the_last_message_of_a_step() -> None:
    """A pipeline waits for its sends when nothing is left to compute; a rank that waited so seemed to work."""
    store = run_of([("pp:0-1", {0: (10, 20)}), ("pp:0-1", {0: (50, 80)})], op="send")
    assert waits(store) == {0: 30}
    before_a_recv = run_of([("pp:0-1", {0: (10, 20)})], op="send")
    recv = {"process_group": "pp:0-1", "op": "recv", "issue_ns": STEP_MS * MS + 30 * MS, "wait_ns": None}
    place = {"attempt": 0, "rank": 0, "step": 1, "seq": 7, "end_ns": STEP_MS * MS + 31 * MS}
    before_a_recv.add("collectives", [recv | place])
    assert device_rows(before_a_recv, 0)["wait"].tolist() == [1, 10, 10]


def test_waiting_in_two_groups_at_once_counts_once() -> None:
    calls = [("dp:0-1", {0: (10, 45), 1: (40, 45)}), ("world:0-1", {0: (20, 45), 1: (40, 45)})]
    assert waits(run_of(calls)) == {0: 30, 1: 0}


def test_loading_that_costs_nothing_is_hidden() -> None:
    """The host loads while its device works: only what made the rank later than its peers is its own."""
    late = {0: (10, 45), 1: (10, 45), 2: (40, 45)}
    table = device_rows(run_of([("dp:0-2", late)], loading_ms={0: 1, 1: 1, 2: 80}), 0)
    own = {int(r): float(d) for r, d in zip(table["rank"], table["data"], strict=True)}
    assert own == {0: 0, 1: 0, 2: pytest.approx(30)}
    even = dict.fromkeys(range(3), (40, 45))
    table = device_rows(run_of([("dp:0-2", even)], loading_ms={0: 1, 1: 1, 2: 80}), 0)
    assert np.all(table["data"] == 0)


def test_waits_measured_on_the_host_take_precedence() -> None:
    assert has_device_calls(run_of([("dp:0-1", {0: (10, 45), 1: (40, 45)})]), 0)
    assert not has_device_calls(run_of([("dp:0-1", {0: (10, 45), 1: (40, 45)})], wait_ns=5), 0)
    assert not has_device_calls(MemoryStore(), 0)


def test_all_compute_of_a_device_has_one_place() -> None:
    timings = load_timings(run_of([("dp:0-1", {0: (10, 45), 1: (40, 45)})]), 0)
    assert timings is not None
    assert list(timings.own) == ["data", "device"]
    assert timings.compute.tolist() == [[70.0] * 3, [100.0] * 3]
