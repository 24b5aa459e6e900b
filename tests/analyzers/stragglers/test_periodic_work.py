"""Steps of a run that are slow at regular intervals: where their time goes, and what is not one's fault."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from analyzers.scope import Scope
from analyzers.stragglers.onsets.periodic_work import throughput
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import MS, plain_run

EXTRA = 260 * MS


def slow(place: str, *, where: str = "step % 10 = 0", store: MemoryStore | None = None, waits: str = "") -> MemoryStore:
    """Every tenth step takes 3.6x as long, in `place`; the other ranks wait in backward for those of `waits`."""
    store = store or plain_run(saves_every=7)
    place_of = {f"{place}_ns": "true"}
    if waits:
        place_of = {f"{place}_ns": waits, "backward_ns": f"NOT ({waits})", "backward_wait_ns": f"NOT ({waits})",
                    "collective_wait_ns": f"NOT ({waits})"}  # fmt: skip
    grown = ", ".join(
        f"{column} = coalesce({column}, 0) + CASE WHEN {of} THEN {EXTRA} ELSE 0 END" for column, of in place_of.items()
    )
    store.connection.execute(f"UPDATE steps SET duration_ns = duration_ns + {EXTRA}, {grown} WHERE {where}")
    return store


def only(store: MemoryStore) -> Finding:
    (finding,) = explained(throughput(store, Scope()))
    return finding


@pytest.mark.parametrize(
    ("place", "where"),
    [("forward", "in forward"), ("backward", "in backward"), ("optimizer", "in the optimizer"),
     ("data", "in data loading")],
)  # fmt: skip
def test_the_phase_that_takes_longer_is_named(place: str, where: str) -> None:
    finding = only(slow(place, where="step % 15 = 8") if place == "data" else slow(place))
    assert (finding.status, finding.cause, finding.ranks) == ("fired", "periodic", ())
    assert finding.evidence["place"] == place
    assert "3.60x as long: 360 instead of 100 ms" in finding.summary
    assert f"All ranks spend 260 ms more {where}." in finding.summary


def test_waiting_for_data_is_left_to_its_own_finding() -> None:
    assert not throughput(slow("data", where="step % 5 = 3"), Scope())


def test_a_rank_for_which_the_others_wait_is_named() -> None:
    finding = only(slow("forward", waits="rank = 2"))
    assert (finding.status, finding.ranks) == ("fired", (2,))
    assert "Rank 2 spends 260 ms more in forward." in finding.summary


def test_a_rank_that_pauses_so_often_is_left_to_the_comparison_of_ranks() -> None:
    assert not throughput(slow("forward", where="step % 5 = 0", waits="rank = 2"), Scope())


def test_garbage_collection_is_named() -> None:
    store = plain_run(saves_every=7)
    store.connection.execute("UPDATE steps SET gc_ns = 0")
    store.connection.execute(f"UPDATE steps SET gc_ns = {EXTRA} WHERE step % 10 = 0")
    finding = only(slow("backward", store=store))
    assert "All ranks spend 260 ms more, mostly in Python's garbage collector." in finding.summary


def on_busy_host(*, extra_cpu_ns: int) -> MemoryStore:
    """Every tenth step takes 260 ms more, of which all but this CPU time is waiting for a core."""
    store = slow("backward")
    store.connection.execute(f"UPDATE steps SET cpu_ns = {100 * MS}, run_delay_ns = 0")
    store.connection.execute(
        f"UPDATE steps SET cpu_ns = cpu_ns + {extra_cpu_ns}, run_delay_ns = {EXTRA - extra_cpu_ns} WHERE step % 10 = 0"
    )
    return store


def test_steps_that_a_scheduler_interrupts_in_turn_are_only_advice() -> None:
    """A script alone on a rank, on a busy machine: every third step of 1 ms took 7 ms, 5.5 of them without a core."""
    elsewhere = on_busy_host(extra_cpu_ns=20 * MS)  # most steps are not interrupted in the same place
    for place, rest in (("forward", 10), ("optimizer", 20)):
        moved = f"backward_ns = backward_ns - {EXTRA}, {place}_ns = {place}_ns + {EXTRA}"
        elsewhere.connection.execute(f"UPDATE steps SET {moved} WHERE step % 30 = {rest}")
    for store in (on_busy_host(extra_cpu_ns=20 * MS), elsewhere):
        finding = only(store)
        assert (finding.status, finding.evidence["core_wait_excess_ms"]) == ("advice", 240.0)
        assert "All ranks spend 260 ms more, mostly waiting for a core." in finding.summary
        assert next_step(finding).startswith("Give the host more cores or fewer processes.")


def test_more_work_on_a_busy_host_stays_a_finding() -> None:
    store = on_busy_host(extra_cpu_ns=110 * MS)
    store.connection.execute(f"UPDATE steps SET run_delay_ns = {135 * MS} WHERE step % 10 > 0")  # waits in each step
    store.connection.execute(f"UPDATE steps SET run_delay_ns = {285 * MS} WHERE step % 10 = 0")
    finding = only(store)
    assert (finding.status, "core_wait_excess_ms" in finding.evidence) == ("fired", False)
    assert "All ranks spend 260 ms more in backward." in finding.summary


def test_slow_transfers_are_waits_of_all_ranks() -> None:
    finding = only(slow("backward", waits="rank < 0"))
    assert (finding.status, finding.evidence["place"]) == ("fired", "communication")
    assert "All ranks wait 260 ms longer in communication." in finding.summary


def test_what_a_loop_does_between_phases_is_only_advice() -> None:
    store = plain_run(saves_every=7)
    for gap in ("before_forward", "forward_to_backward", "backward_to_optimizer", "after_optimizer"):
        store.connection.execute(f"UPDATE steps SET {gap}_ns = 0")
    finding = only(slow("after_optimizer", store=store, waits="rank = 0"))
    assert (finding.status, finding.ranks) == ("advice", (0,))
    assert "Rank 0 spends 260 ms more after the optimizer." in finding.summary


def test_steps_that_save_or_evaluate_are_only_advice() -> None:
    """Rank 0 saves, for which the others wait; or each evaluation empties caches."""
    for where in ("step % 10 = 0", "step % 10 = 1"):
        finding = only(slow("backward", where=where, store=plain_run(saves_every=10)))
        assert finding.status == "advice"
        assert "These steps save or evaluate, or come right after." in finding.summary


def test_longer_batches_are_no_loss() -> None:
    store = slow("backward")
    store.connection.execute("UPDATE steps SET tokens = 4 * tokens WHERE step % 10 = 0")
    assert not throughput(store, Scope())


def test_the_host_of_a_device_is_not_judged() -> None:
    store = slow("backward")
    store.connection.execute("UPDATE ranks SET device = 'cuda:0'")
    assert not throughput(store, Scope())
    store.connection.execute("UPDATE steps SET stamped_steps = 1")
    assert only(store).status == "fired"


def test_a_machines_pauses_between_them_hide_no_interval() -> None:
    store = slow("forward")
    store.connection.execute(
        f"UPDATE steps SET duration_ns = duration_ns + {60 * MS} WHERE step IN (14, 23, 36, 57, 88)"
    )
    assert only(store).evidence["every_steps"] == 10


def test_random_slow_steps_are_chance() -> None:
    """Three in ten steps, as on a busy machine: by their distances alone some of these runs look regular."""
    for seed in range(40):
        steps = np.flatnonzero(np.random.default_rng(seed).random(100) < 0.3)
        store = slow("backward", where=f"step IN ({', '.join(map(str, steps))})")
        assert not throughput(store, Scope()), seed
