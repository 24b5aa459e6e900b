"""Account and verdicts of ranks on GPUs whose steps have the times of their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from analyzers.account.step_account import step_accounts
from analyzers.account.timings import load_timings
from analyzers.finding import Finding
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


def test_steps_between_stamped_ones_are_not_counted_as_idle() -> None:
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


def thinly_stamped(
    interval: int, num_steps: int, slow: range, *, more_ms: float = 30, longer_ms: Callable[[int], float] = lambda _: 0
) -> MemoryStore:
    """Two ranks, of which one in `interval` steps has stamps after the first four; rank 1 is slow in forward.

    `longer_ms(step)`: by how much all ranks wait longer.
    """
    rows = []
    for step in range(1, num_steps + 1):
        late_ms, jitter_ms, all_ms = more_ms if step in slow else 0.0, step * 7 % 5 / 100, longer_ms(step)
        if step > 4 and step % interval:
            rows += [left_out(rank, step, 97 + late_ms + all_ms) for rank in (0, 1)]
            continue
        rows += [
            stamped(1, step, interval=interval, forward=30 + late_ms + jitter_ms, **_waiting(all_ms)),
            stamped(0, step, interval=interval, **_waiting(late_ms + all_ms)),
        ]
    return run_of(rows)


def slow_ranks(store: MemoryStore) -> list[Finding]:
    return [one for one in stragglers(store, Scope()) if one.status == "fired"]


@pytest.mark.parametrize("interval", [2, 4, 8])
def test_a_rank_that_is_slow_in_six_stamped_steps_is_named(interval: int) -> None:
    """Ten stamped ones were wanted: of every eighth step those are 80."""
    since = 10 * interval
    (slow,) = slow_ranks(thinly_stamped(interval, 16 * interval, range(since, 1000)))
    assert (slow.ranks, slow.first_step, slow.evidence["place"]) == ((1,), since, "forward")
    assert slow.evidence["excess_ms"] == pytest.approx(30, abs=0.1)


@pytest.mark.parametrize(
    "slow", [range(61, 81), range(60, 61), range(69, 1000)], ids=["a burst", "a jitter", "three of them"]
)
def test_a_few_stamped_steps_prove_nothing(slow: range) -> None:
    """A burst of another job lasts up to twenty steps, of which each fourth has stamps."""
    assert not slow_ranks(thinly_stamped(4, 80 if slow.stop > 100 else 160, slow))


def test_the_first_steps_are_left_out_and_not_the_first_stamped_ones() -> None:
    """Step 8 also stands for step 5. Of later steps, which a live analysis reads, none is the first."""
    store = thinly_stamped(4, 40, range(0))
    for since, first in ((0, 12), (20, 20)):
        timings = load_timings(store, 0, since_step=since, skip_first=5)
        assert timings is not None
        assert timings.steps[0] == first


def test_a_step_that_only_one_of_two_ranks_stamped_is_not_compared() -> None:
    rows = [stamped(rank, step) for rank in (0, 1) for step in range(1, 9) if (rank, step) != (1, 5)]
    store = run_of([*rows, left_out(1, 5, 97)])
    timings = load_timings(store, 0)
    assert timings is not None
    assert 5 not in timings.steps


@pytest.mark.parametrize("interval", [1, 2])
def test_a_straggler_costs_what_steps_grew_in_the_median(interval: int) -> None:
    """The network was slower by 5 ms before. Each eighth step saves, so a mean is 15 ms longer than a median: the mean
    of the steps since, against the median before, let all 8 ms be the cost."""
    store = thinly_stamped(
        interval, 160, range(80, 1000), more_ms=8, longer_ms=lambda step: 120 * (step % 8 == 0) + 5 * (step < 80)
    )
    (slow,) = slow_ranks(store)
    of: Mapping[str, Any] = slow.evidence
    assert of["step_ms"] - of["step_without_it_ms"] == pytest.approx(3, abs=0.5)


def with_forward(forward_ms: Callable[[int, int], float], num_ranks: int) -> MemoryStore:
    """Ranks that wait in the backward pass for the slowest of them; `forward_ms(rank, step)`."""
    rows = []
    for step in range(1, 91):
        times = [forward_ms(rank, step) + (rank + step) * 7 % 5 / 10 for rank in range(num_ranks)]
        rows += [stamped(rank, step, forward=ms, **_waiting(max(times) - ms)) for rank, ms in enumerate(times)]  # type: ignore[arg-type]
    return run_of(rows)


@pytest.mark.parametrize(("num_ranks", "slow"), [(4, {1, 2}), (8, {1, 2, 5})])
def test_ranks_that_slow_down_together_are_named_if_half_of_them_do_not(num_ranks: int, slow: set[int]) -> None:
    """Each was as far off as the other, so neither was named."""
    found = slow_ranks(with_forward(lambda rank, step: 60 if rank in slow and step >= 40 else 30, num_ranks))
    assert {one.ranks[0] for one in found} == slow
    assert all(one.first_step == 40 and one.evidence["place"] == "forward" for one in found)


@pytest.mark.parametrize(
    ("num_ranks", "changed", "forward_ms"),
    [(4, {0, 3}, 10), (4, {0, 1, 2}, 60), (2, {0, 1}, 60)],
    ids=["half of them are faster", "all but one are slower", "both are slower"],
)
def test_no_rank_is_named_where_too_few_ranks_keep_their_speed(
    num_ranks: int, changed: set[int], forward_ms: float
) -> None:
    assert not slow_ranks(
        with_forward(lambda rank, step: forward_ms if rank in changed and step >= 40 else 30, num_ranks)
    )
