"""Rows of a plain healthy run, for tests that break one thing in it.

store = plain_run(ranks=4, steps=100)
store.connection.execute("UPDATE steps SET data_ns = 60000000, duration_ns = duration_ns + 59000000")
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
S = 1_000_000_000
BEGIN_NS = 10**15


def plain_run(*, ranks: int = 4, steps: int = 100, step_ms: float = 100.0, saves_every: int = 20) -> MemoryStore:
    """A run of one attempt: a launch of 2 s, imports of 3 s, 1 s until the first step, steady steps, good saves."""
    store = MemoryStore()
    store.event("run_started", wall_ns=BEGIN_NS)
    store.event("attempt_started", wall_ns=BEGIN_NS + 2 * S)
    begin_ns = BEGIN_NS + 6 * S
    number = np.arange(1, steps + 1)
    for rank in range(ranks):
        place = {"attempt": 0, "rank": rank, "wall_ns": BEGIN_NS + 5 * S, "world_size": ranks, "host": "node-0"}
        store.add("ranks", [place | {"device": "cpu", "dp_replicate": rank, "tp": 0, "pp": 0}])
        store.add_columns(
            "steps",
            attempt=np.zeros(steps, np.int32),
            rank=np.full(steps, rank, np.int32),
            step=number,
            start_ns=begin_ns + ((number - 1) * step_ms * MS).astype(np.int64),
            duration_ns=np.full(steps, int(step_ms * MS)),
            data_ns=np.full(steps, MS),
            data_wait_ns=np.zeros(steps, np.int64),
            forward_ns=np.full(steps, int(0.3 * step_ms * MS)),
            backward_ns=np.full(steps, int(0.6 * step_ms * MS)),
            optimizer_ns=np.full(steps, int(0.05 * step_ms * MS)),
            checkpoint_ns=np.where(number % saves_every == 0, MS, 0),
            evaluate_ns=np.zeros(steps, np.int64),
            tokens=np.full(steps, 4096),
            memory_bytes=np.full(steps, 1 << 30) + (number % 7) * (1 << 16),
        )
    for step in range(saves_every, steps + 1, saves_every):
        for state in ("writing", "complete", "verified", "good"):
            save(store, step, state)
    end_ns = begin_ns + int(steps * step_ms * MS)
    store.event("run_ended", wall_ns=end_ns + S, reason="finished", exit_code=0)
    return store


def save(store: MemoryStore, step: int, state: str, **more: Any) -> None:
    """One state of a save on disk, at the time of its step."""
    row: dict[str, Any] = {"attempt": 0, "rank": 0, "wall_ns": BEGIN_NS + 6 * S + step * 100 * MS, "step": step}
    row |= {"tier": "disk", "state": state, "stall_ns": MS, "duration_ns": 200 * MS, "bytes": 1 << 20}
    store.add("checkpoints", [row | more])
