"""Exposed and overlapped communication, bandwidth, buckets: simulated worlds whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analyzers.account.device.exposure import exposed_calls, measure
from analyzers.communication.analyze import communication
from analyzers.communication.bandwidth import call_classes, call_columns
from analyzers.figures.time import collectives
from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from analyzers.scope import Scope
from analyzers.source import Source, floats
from tests.analyzers.bucketed_world import bucketed_world
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore


def judged(store: Source) -> list[Finding]:
    return explained(communication(store, Scope()))


def of_kind(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


def test_only_the_last_bucket_behind_backward_is_exposed() -> None:
    """Four buckets of 6 ms behind 10 ms of backward each: the last one alone is exposed."""
    store = bucketed_world(buckets=4, bucket_bytes=4_000_000, gb_per_s=1.0, latency_ms=0.0)
    measured = measure(store, 0)
    assert measured.num_steps == 30
    assert measured.exposed_ms == pytest.approx(6.0)
    assert measured.transfer_ms == pytest.approx(6.0)
    assert measured.busy_ms == pytest.approx(24.0)
    assert measured.overlapped_ms == pytest.approx(18.0)
    finding = of_kind(judged(store), "exposed_communication")
    assert finding.status == "ok"
    assert finding.evidence["overlapped_ratio"] == pytest.approx(0.75)
    assert finding.evidence["exposed_transfer_ratio"] == pytest.approx(6 / 68, rel=1e-3)
    (one,) = call_classes(store, 0)
    assert one.bus_gb_per_s == pytest.approx(1.0)
    assert one.bus_bytes == pytest.approx(6_000_000)
    assert one.relative_bandwidth_ratio == 1.0


def test_exposed_time_by_call_adds_up_to_that_of_the_steps() -> None:
    store = bucketed_world(buckets=4, bucket_bytes=4_000_000, gb_per_s=1.0, latency_ms=0.0)
    found, measured = exposed_calls(store, 0), measure(store, 0)
    assert found["num_classes"].tolist() == [1]
    assert found["num_calls"].tolist() == [4.0]
    assert found["exposed_ms"].sum() == pytest.approx(measured.exposed_ms.mean())
    assert found["transfer_ms"].sum() == pytest.approx(measured.transfer_ms.mean())
    assert found["busy_ms"].tolist() == pytest.approx([24.0])
    assert found["exposed_ratio"].tolist() == pytest.approx([0.25])


def test_exposed_time_is_split_by_operation_size_and_group_with_late_ranks_apart() -> None:
    """Two sizes, two operations; of the large all_gather rank 0 is blocked for 10 ms, 6 of them for a late member."""
    store = MemoryStore()
    ms, calls = 1_000_000, []
    classes = (("all_gather", 8 << 20, 10, 4), ("all_gather", 1 << 10, 1, 1), ("all_reduce", 4, 3, 3))
    for seq, (op, num_bytes, waited, transfer) in enumerate(classes):
        for rank in range(2):
            took = waited if rank == 0 else transfer
            calls.append(
                {"attempt": 0, "rank": rank, "step": 1, "op": op, "process_group": "g:0-1", "seq": seq,
                 "bytes": num_bytes, "issue_ns": 20 * seq * ms, "end_ns": (20 * seq + took) * ms, "wait_ns": took * ms}
            )  # fmt: skip
    store.add("collectives", calls)
    step = {"attempt": 0, "step": 1, "start_ns": 0, "duration_ns": 100 * ms}
    store.add(
        "steps", [step | {"rank": 0, "collective_wait_ns": 14 * ms}, step | {"rank": 1, "collective_wait_ns": 4 * ms}]
    )
    found = exposed_calls(store, 0)
    assert found["op"].tolist() == ["all_gather", "all_reduce", "all_gather"]
    # Rank 1 waited in 8 ms of calls and counted 4 of them: beside one another.
    assert found["exposed_ms"].tolist() == pytest.approx([(10 + 2) / 2, (3 + 1.5) / 2, (1 + 0.5) / 2])
    assert found["transfer_ms"].tolist() == pytest.approx([(4 + 2) / 2, (3 + 1.5) / 2, (1 + 0.5) / 2])
    assert exposed_calls(store, 0, limit=1)["num_classes"].tolist() == [3]


def test_a_step_that_a_rollback_repeated_counts_by_its_last_execution() -> None:
    """Steps 1 to 3, back to 2, and 2 and 3 again with half of the wait; of step 4 only the beginning is known."""
    store, ms = MemoryStore(), 1_000_000
    steps, calls = [], []
    for place, (step, waited) in enumerate(((1, 8), (2, 8), (3, 8), (2, 4), (3, 4), (4, 0))):
        for rank in range(2):
            row = {"attempt": 0, "rank": rank, "step": step, "start_ns": 100 * place * ms}
            ended = {"duration_ns": 100 * ms, "collective_wait_ns": waited * ms}
            steps.append(row | (ended if waited else dict.fromkeys(ended)))
            took = waited * ms
            calls.append(
                {"attempt": 0, "rank": rank, "step": step, "op": "all_reduce", "process_group": "g:0-1", "seq": place,
                 "bytes": 64, "issue_ns": (100 * place + 50) * ms, "wait_ns": took,
                 "end_ns": (100 * place + 50) * ms + took}
            )  # fmt: skip
    store.add("steps", steps)
    store.add("collectives", calls)
    measured, by_call = measure(store, 0), exposed_calls(store, 0)
    assert measured.step.tolist() == [1, 1, 2, 2, 3, 3]
    assert measured.exposed_ms.tolist() == measured.busy_ms.tolist() == [8.0, 8.0, 4.0, 4.0, 4.0, 4.0]
    assert by_call["num_calls"].tolist() == [1.0]
    assert by_call["exposed_ms"].tolist() == pytest.approx([16 / 3])


def test_a_slow_link_is_exposed_and_a_late_rank_is_not_communication() -> None:
    finding = of_kind(judged(bucketed_world(gb_per_s=0.2)), "exposed_communication")
    assert (finding.status, finding.cause, finding.advice) == ("advice", "transfer", "exposed-communication")
    assert finding.evidence["exposed_transfer_ratio"] > 0.4
    late = of_kind(judged(bucketed_world(gb_per_s=2.0, slow={3: 2.0})), "exposed_communication")
    assert late.status == "ok"
    assert late.evidence["waiting_for_late_ratio"] > 0.3


def test_small_buckets_are_found_where_one_large_call_shows_the_bandwidth() -> None:
    store = bucketed_world(steps=16, buckets=64, bucket_bytes=64 << 10, latency_ms=1.0, gb_per_s=2.0)
    seen = {"attempt": 0, "op": "all_gather", "process_group": "dp_shard:0-3", "phase": "forward", "bytes": 8 << 20}
    took_ns = int(3 * (8 << 20) / 2.0)  # 2 GB/s over each link
    seen |= {"step": 9, "seq": 0, "issue_ns": 10**12, "end_ns": 10**12 + took_ns, "wait_ns": 0}
    store.add("collectives", [seen | {"rank": rank} for rank in range(4)])
    finding = of_kind(judged(store), "small_buckets")
    assert (finding.status, finding.advice) == ("advice", "small-buckets")
    assert finding.evidence["calls_per_step"] == pytest.approx(64)
    assert finding.evidence["latency_ms"] == pytest.approx(1.0, rel=0.1)
    assert finding.evidence["gain_ms"] > 20


@pytest.mark.parametrize(("gb_per_s", "is_advised"), [(2.0, False), (0.1, True)])
def test_buckets_that_take_long_on_one_link_only_are_not_small(gb_per_s: float, is_advised: bool) -> None:
    """A slow link made '4 calls of 8,192 KiB mostly latency': equal calls of another group show what they take."""
    store = bucketed_world(steps=16, buckets=64, bucket_bytes=64 << 10, latency_ms=1.0, gb_per_s=2.0)
    seen = {"attempt": 0, "op": "all_reduce", "phase": "backward", "step": 9, "issue_ns": 10**12, "wait_ns": 0}
    for seq, (group, size, speed) in enumerate((("dp_replicate:4-7", 64 << 10, gb_per_s), ("tp:0-3", 8 << 20, 2.0))):
        row = seen | {"process_group": group, "bytes": size, "seq": seq, "end_ns": 10**12 + int(1.5 * size / speed)}
        store.add("collectives", [row | {"rank": rank} for rank in range(4)])
    assert ("small_buckets" in [finding.kind for finding in judged(store)]) is is_advised


def test_larger_buckets_are_advised_where_latency_takes_time_and_not_where_bytes_do() -> None:
    small = bucketed_world(steps=16, buckets=64, bucket_bytes=64 << 10, latency_ms=1.0, gb_per_s=2.0)
    assert next_step(of_kind(judged(small), "exposed_communication")).startswith("Use larger buckets")
    large = bucketed_world(buckets=4, bucket_bytes=32 << 20, gb_per_s=1.5)
    finding = of_kind(judged(large), "exposed_communication")
    assert finding.evidence["latency_ratio"] == 0.0
    assert "Calls move their bytes at 1.5 GB/s, so larger buckets would save little." in next_step(finding)


def test_reduced_activations_are_not_gradient_buckets() -> None:
    """Tensor parallelism reduces in the forward pass what it reduces in the backward pass: there is no bucket."""
    store = bucketed_world(steps=16, buckets=64, bucket_bytes=64 << 10, latency_ms=1.0, gb_per_s=2.0)
    assert of_kind(judged(store), "exposed_communication")
    store.connection.execute("UPDATE collectives SET phase = 'forward' WHERE seq % 2 = 0")
    assert "small_buckets" not in [finding.kind for finding in judged(store)]


def test_large_buckets_and_small_votes_are_not_blamed() -> None:
    assert [f.kind for f in judged(bucketed_world(buckets=4))] == ["exposed_communication"]


def test_a_dimension_over_a_slower_link() -> None:
    store = bucketed_world(group="tp", gb_per_s=8.0)
    bucketed_world(group="dp_shard", gb_per_s=0.8, store=store)
    store.connection.execute("DELETE FROM steps WHERE rowid >= (SELECT count(*) // 2 FROM steps)")
    finding = of_kind(judged(store), "low_bandwidth")
    assert (finding.status, finding.cause) == ("advice", "dp_shard")
    assert finding.evidence["factor_ratio"] == pytest.approx(10, rel=0.1)


def test_missing_records_are_reported() -> None:
    (nothing,) = judged(MemoryStore())
    assert nothing.status == "insufficient_data"
    store = bucketed_world()
    store.connection.execute("DELETE FROM collectives")
    (finding,) = judged(store)
    assert (finding.status, "collectives" in finding.summary) == ("insufficient_data", True)
    (short,) = judged(bucketed_world(steps=8))
    assert short.status == "insufficient_data"
    alone = bucketed_world(ranks=2)
    alone.connection.execute("DELETE FROM collectives; DELETE FROM steps WHERE rank > 0")
    assert judged(alone) == [], "one rank has nobody to talk to"


def test_uneven_exchanges_of_similar_sizes_are_one_class() -> None:
    """Tokens on their way to experts: each call has a size of its own, which must not make thousands of classes."""
    store = MemoryStore()
    call = {"attempt": 0, "op": "all_to_all", "process_group": "ep:0-1", "wait_ns": 10**6}
    store.add(
        "collectives",
        [
            call | {"rank": rank, "step": seq, "seq": seq, "bytes": 60_000 + 131 * seq + rank, "issue_ns": seq * 10**7,
                    "end_ns": seq * 10**7 + 10**6}
            for seq in range(1, 40)
            for rank in range(2)
        ],
    )  # fmt: skip
    table = call_columns(store)
    assert table["bytes"].tolist() == [1 << 16]
    assert table["num_calls"].tolist() == [39.0]


def test_waits_that_were_not_measured_are_not_zero() -> None:
    """The profiler plugin times calls on the device, where no wait is recorded."""
    store = MemoryStore()
    call = {"attempt": 0, "op": "all_reduce", "process_group": "world:0-1", "bytes": 1 << 20, "seq": 1, "step": 1}
    store.add("collectives", [call | {"rank": rank, "issue_ns": 0, "end_ns": 2 * 10**6} for rank in range(2)])
    table = call_columns(store)
    assert not np.isfinite(floats(table["wait_s"])).any()
    (one,) = call_classes(store, 0)
    assert math.isnan(one.wait_s)
    assert not collectives.waits(table).data[0].x
    (points,) = collectives.draw(table).data
    assert "waited" not in points.hovertext[0]


def test_a_send_has_no_transfer_time_because_it_includes_the_wait_for_the_other_rank() -> None:
    store = MemoryStore()
    call = {"attempt": 0, "process_group": "pp:0-1", "bytes": 1 << 20, "seq": 1, "step": 1, "issue_ns": 0}
    store.add(
        "collectives",
        [
            call | {"rank": 0, "peer": 1, "op": "send", "end_ns": 9 * 10**6, "wait_ns": 8 * 10**6},
            call | {"rank": 0, "peer": None, "op": "all_reduce", "end_ns": 2 * 10**6, "wait_ns": 0},
            call | {"rank": 1, "peer": None, "op": "all_reduce", "end_ns": 2 * 10**6, "wait_ns": 0},
        ],
    )
    table = call_columns(store)
    assert table["op"].tolist() == ["send", "all_reduce"]
    assert np.isnan(floats(table["transfer_ms"])[0])
    assert np.isnan(floats(table["bus_gb_per_s"])[0])
    assert floats(table["transfer_ms"])[1] == pytest.approx(2.0)


def test_classes_with_equal_waits_keep_a_fixed_order() -> None:
    """A report of the same records is the same."""
    store = MemoryStore()
    sizes = [4096, 64, 1 << 20, 512, 8192, 16, 2048, 256]
    rows = [
        {"attempt": 0, "rank": rank, "step": step, "seq": step * len(sizes) + place, "op": "all_reduce",
         "process_group": "world:0-1", "bytes": size, "issue_ns": step * 1000 + place * 10,
         "end_ns": step * 1000 + place * 10 + 5, "wait_ns": 0}
        for step in range(4) for place, size in enumerate(sizes) for rank in range(2)
    ]  # fmt: skip
    store.add("collectives", rows)
    assert call_columns(store)["bytes"].tolist() == sorted(sizes)
