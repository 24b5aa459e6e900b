"""Ranks on GPUs whose waits nobody measured: no reader takes the time for work, or for nothing."""

from __future__ import annotations

from analyzers.account.goodput import measure
from analyzers.account.step_account import coverage
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000


def test_unmeasured_time_is_not_goodput() -> None:
    """As work it was 86 % of the run; what is on the tape is the step, and its loading on the host."""
    store = MemoryStore()
    places = [{"wall_ns": 1, "attempt": 0, "rank": rank, "world_size": 2, "device": f"cuda:{rank}"} for rank in (0, 1)]
    store.add("ranks", places)
    steps = [
        {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 100 * MS, "duration_ns": 100 * MS,
         "data_ns": 5 * MS, "committed": True}
        for rank in (0, 1)
        for step in range(1, 21)
    ]  # fmt: skip
    store.add("steps", steps)
    store.event("run_started", wall_ns=0, rank=-1)
    store.event("run_ended", wall_ns=2200 * MS, rank=-1)
    account = measure(store)
    assert account is not None
    assert account.to_json()["goodput_ratio"] is None
    assert account.seconds["training"] == 0
    assert account.seconds["unmeasured"] > 1.8
    found = coverage(store)
    assert found is not None
    assert found.not_measured_ratio > 0.9
