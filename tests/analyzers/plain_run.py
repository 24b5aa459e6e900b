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
    place = {
        "attempt": 0,
        "wall_ns": BEGIN_NS + 5 * S,
        "world_size": ranks,
        "host": "node-0",
        "device": "cpu",
        "tp": 0,
        "pp": 0,
    }
    store.add("ranks", [place | {"rank": rank, "dp_replicate": rank} for rank in range(ranks)])
    number, num_rows = np.tile(np.arange(1, steps + 1), ranks), ranks * steps
    store.add_columns(
        "steps",
        attempt=np.zeros(num_rows, np.int32),
        rank=np.repeat(np.arange(ranks, dtype=np.int32), steps),
        step=number,
        start_ns=begin_ns + ((number - 1) * step_ms * MS).astype(np.int64),
        duration_ns=np.full(num_rows, int(step_ms * MS)),
        data_ns=np.full(num_rows, MS),
        data_wait_ns=np.zeros(num_rows, np.int64),
        forward_ns=np.full(num_rows, int(0.3 * step_ms * MS)),
        backward_ns=np.full(num_rows, int(0.6 * step_ms * MS)),
        optimizer_ns=np.full(num_rows, int(0.05 * step_ms * MS)),
        checkpoint_ns=np.where(number % saves_every == 0, MS, 0),
        evaluate_ns=np.zeros(num_rows, np.int64),
        tokens=np.full(num_rows, 4096),
        memory_bytes=np.full(num_rows, 1 << 30) + (number % 7) * (1 << 16),
    )
    states = ("writing", "complete", "verified", "good")
    saves = [_save(step, state) for step in range(saves_every, steps + 1, saves_every) for state in states]
    store.add("checkpoints", saves)
    end_ns = begin_ns + int(steps * step_ms * MS)
    store.event("run_ended", wall_ns=end_ns + S, reason="finished", exit_code=0)
    return store


def save(store: MemoryStore, step: int, state: str, **more: Any) -> None:
    """One state of a save on disk, at the time of its step."""
    store.add("checkpoints", [_save(step, state) | more])


def _save(step: int, state: str) -> dict[str, Any]:
    return {
        "attempt": 0, "rank": 0, "wall_ns": BEGIN_NS + 6 * S + step * 100 * MS, "step": step, "tier": "disk",
        "state": state, "stall_ns": MS, "duration_ns": 200 * MS, "bytes": 1 << 20,
    }  # fmt: skip
