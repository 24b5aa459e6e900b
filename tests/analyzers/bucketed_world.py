"""Simulated data-parallel steps: ranks compute a backward pass and hand over buckets, a link moves one after the other.

store = bucketed_world(ranks=4, steps=30, buckets=5, bucket_bytes=4 << 20, gb_per_s=1.0, latency_ms=0.2)

A bucket can travel when every rank has handed it over, and the link carries one at a time; the optimizer begins when
the last one has arrived. What is exposed follows from that; nothing here knows what an analyzer looks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000


def bucketed_world(
    *,
    ranks: int = 4,
    steps: int = 30,
    buckets: int = 4,
    bucket_bytes: int = 4 << 20,
    backward_ms: float = 40.0,
    forward_ms: float = 20.0,
    gb_per_s: float = 1.0,
    latency_ms: float = 0.05,
    slow: Mapping[int, float] | None = None,
    group: str = "dp_replicate",
    store: MemoryStore | None = None,
) -> MemoryStore:
    """`gb_per_s`: of each link of the ring. `slow`: {rank: factor} on its own work."""
    store = store or MemoryStore()
    label = f"{group}:0-{ranks - 1}"
    transfer = int((latency_ms + bucket_bytes * 2 * (ranks - 1) / ranks / gb_per_s / 1e6) * MS)
    calls: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    clocks = [0] * ranks
    for step in range(1, steps + 1):
        starts = list(clocks)
        factors = [(slow or {}).get(rank, 1.0) for rank in range(ranks)]
        begun = [clocks[rank] + int(forward_ms * factors[rank] * MS) for rank in range(ranks)]
        done = [begun[rank] + int(backward_ms * factors[rank] * MS) for rank in range(ranks)]
        free = 0
        ends: list[int] = []
        for bucket in range(buckets):
            ready = [begun[rank] + (done[rank] - begun[rank]) * (bucket + 1) // buckets for rank in range(ranks)]
            free = max(free, *ready) + transfer
            ends.append(free)
            for rank in range(ranks):
                last = bucket == buckets - 1
                calls.append(
                    {"attempt": 0, "rank": rank, "step": step, "seq": (step - 1) * buckets + bucket, "op": "all_reduce",
                     "process_group": label, "bytes": bucket_bytes, "phase": "backward", "issue_ns": ready[rank],
                     "end_ns": free, "wait_ns": free - done[rank] if last else 0}
                )  # fmt: skip
        for rank in range(ranks):
            waited = ends[-1] - done[rank]
            clocks[rank] = ends[-1] + 2 * MS
            rows.append(
                {"attempt": 0, "rank": rank, "step": step, "start_ns": starts[rank],
                 "duration_ns": clocks[rank] - starts[rank], "data_ns": 0, "forward_ns": begun[rank] - starts[rank],
                 "backward_ns": ends[-1] - begun[rank], "optimizer_ns": 2 * MS, "backward_wait_ns": waited,
                 "collective_wait_ns": waited}
            )  # fmt: skip
    store.add("steps", rows)
    store.add("collectives", calls)
    return store
