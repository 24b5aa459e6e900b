"""Account and verdicts of ranks on GPUs whose steps have the times of their devices."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.account.step_account import step_accounts
from analyzers.account.timings import load_timings
from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from analyzers.stragglers.throughput import step_times
from probes.step_clock import GAPS, PHASES
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
USUAL_MS = {"data": 0, "forward": 30, "backward": 60, "optimizer": 5, "before_forward": 1, "after_optimizer": 1}


def stamped(rank: int, step: int, *, interval: int = 1, **more_ms: float) -> dict[str, Any]:
    """A row of `steps`; `forward=45` sets a time, `forward_wait` and `forward_late` parts of it."""
    times = USUAL_MS | more_ms
    row: dict[str, Any] = {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 200 * MS}
    for place in (*PHASES, *GAPS):
        row[f"{place}_ns"] = int(times.get(place, 0) * MS)
        if place not in ("checkpoint", "evaluate"):
            row[f"{place}_wait_ns"] = int(times.get(f"{place}_wait", 0) * MS)
            row[f"{place}_late_ns"] = int(times.get(f"{place}_late", 0) * MS)
    row["duration_ns"] = sum(row[f"{place}_ns"] for place in (*PHASES, *GAPS))
    row["collective_wait_ns"] = sum(value for name, value in row.items() if name.endswith("_wait_ns"))
    return row | {"stamped_steps": interval, "committed": True, "tokens": 100}


def left_out(rank: int, step: int, duration_ms: float, checkpoint_ms: float = 0.0) -> dict[str, Any]:
    """A step that is left to the stamped ones: what its host knows."""
    known = {
        "attempt": 0, "rank": rank, "step": step, "start_ns": step * 200 * MS, "duration_ns": int(duration_ms * MS),
        "checkpoint_ns": int(checkpoint_ms * MS), "evaluate_ns": 0, "stamped_steps": 0, "committed": True,
        "tokens": 100,
    }  # fmt: skip
    return dict.fromkeys(stamped(rank, step), None) | known


def run_of(rows: list[dict[str, Any]]) -> MemoryStore:
    store = MemoryStore()
    ranks = sorted({row["rank"] for row in rows})
    store.add("ranks", [
        {"attempt": 0, "rank": rank, "device": f"cuda:{rank}", "wall_ns": 0, "world_size": len(ranks)} for rank in ranks
    ])  # fmt: skip
    store.add("steps", rows)
    return store


def test_stamped_steps_stand_for_those_between_them() -> None:
    """But for a checkpoint, which the host times in every step. They read as "not measured", half of the run."""
    rows = [
        stamped(rank, step, interval=2, backward_wait=12, before_forward=9, before_forward_late=8)
        if step % 2 == 0
        else left_out(rank, step, 165 if step == 5 else 105, 60 if step == 5 else 0)
        for rank in (0, 1)
        for step in range(1, 9)
    ]
    for account in step_accounts(run_of(rows)):
        assert account.num_steps == 8
        assert account.duration_ns == (8 * 105 + 60) * MS
        assert account.own_ns["forward"] == 8 * 30 * MS
        assert account.own_ns["backward"] == 8 * 48 * MS
        assert account.own_ns["checkpoint"] == 60 * MS
        assert account.own_ns["before_forward"] == 8 * MS
        assert account.waiting_ns + (account.transfer_ns or 0) == 8 * 12 * MS
        assert account.host_late_ns == 8 * 8 * MS
        assert account.not_measured_ns == 0


def test_steps_that_lost_their_stamps_are_not_measured() -> None:
    rows = [stamped(0, step) for step in range(1, 5)]
    lost = left_out(0, 5, 97) | {"stamped_steps": None}
    (account,) = step_accounts(run_of([*rows, lost]))
    assert account.not_measured_ns == 97 * MS


def test_steps_between_stamped_ones_are_no_steps_without_work() -> None:
    rows = [
        stamped(rank, step, interval=2) if step % 2 == 0 else left_out(rank, step, 97)
        for rank in (0, 1)
        for step in range(1, 41)
    ]
    store = run_of(rows)
    timings = load_timings(store, 0)
    assert timings is not None
    assert timings.steps.tolist() == list(range(2, 41, 2))
    assert set(timings.compute.ravel().tolist()) == {97.0}
    times = step_times(store, 0)
    assert times is not None
    assert set(times.compute.tolist()) == {97.0}


@pytest.mark.parametrize(
    ("slow", "place", "side", "text"),
    [
        ({"forward": 60}, "forward", "device", "+30 ms of compute per step in forward, on its device"),
        (
            {"before_forward": 31, "before_forward_late": 30},
            "before_forward",
            "host",
            "+30 ms of compute per step before the forward pass, on its host",
        ),
    ],
    ids=["device", "host that sleeps before the batch"],
)
def test_a_slow_rank_has_place_side_and_onset(slow: dict[str, float], place: str, side: str, text: str) -> None:
    """Its peer waits as long in the backward pass. The host that slept was named with 17.5 ms of 30."""
    rows = []
    for step in range(1, 81):
        is_slow = step >= 40
        rows += [stamped(1, step, **(slow if is_slow else {})), stamped(0, step, **_waiting(30 if is_slow else 0))]
    store = run_of([row | {"forward_ns": row["forward_ns"] + (row["step"] * 7 % 5) * 10_000} for row in rows])
    (finding,) = [one for one in stragglers(store, Scope()) if one.status == "fired"]
    assert finding.ranks == (1,)
    assert finding.evidence["place"] == place
    assert finding.evidence["late_side"] == side
    assert finding.first_step is not None
    assert abs(finding.first_step - 40) <= 2
    assert text in finding.summary
    assert finding.evidence["speedup_without_it_ratio"] == pytest.approx(127 / 97, abs=0.02)


def _waiting(ms: float) -> dict[str, float]:
    return {"backward": 60 + ms, "backward_wait": ms}
