from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.live import (
    LivePolicy,
    LiveState,
    changed,
    live_findings,
    record_findings,
    remembered,
    standstill_findings,
)
from analyzers.run.policy import StallPolicy
from analyzers.run.records.cached_source import CachedSource
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.numerics.test_loss_spike import observations as spike_observations
from tests.analyzers.numerics.test_nonfinite import run_with_nan
from tests.analyzers.plain_run import BEGIN_NS, S, plain_run, save
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.standstill import STEP_NS, World
from tests.analyzers.stragglers.test_straggler import stored


def told(store: MemoryStore, state: LiveState, now_ns: int, ticks: int = 5) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kind, status, ranks) of all that is said in some ticks at one moment, in which the records stay the same."""
    source = CachedSource(store)
    said = [finding for _ in range(ticks) for finding in live_findings(source, state, now_ns)]
    assert state.errors == {}
    return [(finding.kind, finding.status, finding.ranks) for finding in said]


def waiting_world() -> World:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    return world


def test_a_hang_is_reported_once() -> None:
    world, state = waiting_world(), LiveState(stall=StallPolicy(floor_s=3.0))
    assert told(world.store, state, world.after(2.5)) == []
    assert told(world.store, state, world.after(3.5)) == [("hang", "fired", (1,))]
    assert told(world.store, state, world.after(60)) == []


@pytest.mark.parametrize(("waiting", "named"), [((0, 1), ()), ((0,), (1,))], ids=["all-wait", "one-does-not"])
def test_ranks_of_other_nodes_without_records_are_not_blamed(waiting: tuple[int, ...], named: tuple[int, ...]) -> None:
    """A node with a disk of its own knows nothing of the others' ranks; its stacks were taken on the leader's word."""
    world = World(ranks=2, groups={"dp[0,1,2,3]": (0, 1, 2, 3)})
    world.store.add("ranks", [{"attempt": 0, "rank": 0, "wall_ns": 1, "world_size": 4}])
    for rank in waiting:
        world.enter(rank)
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1])
    (finding,) = standstill_findings(world.store, LiveState(sees_part=True), world.after(7))
    assert finding.ranks == named
    assert (finding.cause == "not_seen") is not bool(named)
    assert finding.evidence.get("unseen_ranks", []) == ([] if named else [2, 3])
    checked([finding])
    (finding,) = standstill_findings(world.store, LiveState(), world.after(7))
    assert finding.ranks == (*named, 2, 3), "where all record here, a rank without a record has not come"


def test_a_hang_is_told_again_when_more_is_known_and_when_it_is_over() -> None:
    world, state = waiting_world(), LiveState()
    told(world.store, state, world.after(6))
    world.event("rank_state", 6.5, state_rank=1, state="stopped", os_state="T")
    (finding,) = live_findings(world.store, state, world.after(7))
    assert (finding.kind, finding.cause, finding.ranks) == ("hang", "stopped", (1,))
    world.store.connection.execute(f"UPDATE collectives SET end_ns = {world.after(8)} WHERE end_ns IS NULL")
    world.event("rank_state", 7.9, state_rank=1, state="running", os_state="R")
    assert told(world.store, state, world.after(8.5)) == [("hang", "ok", (1,))]


def test_a_hang_that_is_over_lasted_until_it_was_last_found_and_not_only_until_it_was_reported() -> None:
    world, state = waiting_world(), LiveState()
    assert told(world.store, state, world.after(6)) == [("hang", "fired", (1,))]
    assert told(world.store, state, world.after(26)) == []
    world.store.connection.execute(f"UPDATE collectives SET end_ns = {world.after(27)} WHERE end_ns IS NULL")
    (over,) = live_findings(world.store, state, world.after(27.5))
    (lasted,) = re.findall(r" for ([\d.]+) s\.", over.summary)
    assert float(lasted) > 20, over.summary


STACK = 'Stack (most recent call first):\n  File "/home/me/train.py", line 18 in fetch\n'


@pytest.mark.parametrize(("taken_s", "is_named"), [(6.5, True), (0.0, False)], ids=["now", "in-an-earlier-hang"])
def test_a_hang_is_told_again_with_the_line_once_its_stacks_were_taken(
    tmp_path: Path, taken_s: float, is_named: bool
) -> None:
    world, state = waiting_world(), LiveState(stacks_dir=tmp_path)
    assert told(world.store, state, world.after(6)) == [("hang", "fired", (1,))]
    (tmp_path / "attempt-0-rank-00001.txt").write_text(STACK)
    world.event("stacks", taken_s, path="stacks", ranks=[1])
    again = live_findings(world.store, state, world.after(7))
    assert ["train.py:18 fetch" in finding.summary for finding in again] == [True] * is_named
    assert told(world.store, state, world.after(9)) == []


def slow(excess_ms: float, factor: float, measured_by: str) -> Finding:
    evidence = {"excess_ms": excess_ms, "factor_ratio": factor, "measured_by": measured_by}
    return Finding(
        analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="", evidence=evidence
    )


@pytest.mark.parametrize(
    ("now", "is_told"),
    [
        (slow(48.2, 1.48, ""), False),
        (slow(48.2, 1.9, ""), True),
        (slow(48.2, 1.48, "CPU time"), True),
    ],
    ids=["another-measure", "another-measure-and-twice-as-slow", "twice-as-much-of-the-same"],
)
def test_a_straggler_is_told_again_where_it_grew_and_not_where_it_is_measured_otherwise(
    now: Finding, is_told: bool
) -> None:
    assert changed(slow(21.5, 1.41, "CPU time"), now) == is_told


def test_a_hang_is_not_over_because_its_run_is_stopped() -> None:
    world, state = waiting_world(), LiveState()
    told(world.store, state, world.after(6))
    state.is_stopping = True
    world.store.connection.execute(f"UPDATE collectives SET end_ns = {world.after(8)} WHERE end_ns IS NULL")
    for rank in world.ranks:
        world.event("rank_closed", 8.1, rank=rank)
    assert told(world.store, state, world.after(8.5)) == []


def test_a_killed_rank_is_told_within_two_seconds() -> None:
    world, state = waiting_world(), LiveState()
    world.event("rank_state", 0.5, state_rank=1, state="dead", os_state="")
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=3, message="")
    (finding,) = live_findings(world.store, state, world.after(0.6))
    assert (finding.kind, finding.ranks, finding.cause) == ("rank_lost", (1,), "signal")
    assert told(world.store, state, world.after(60)) == []


def as_event(finding: Finding) -> dict[str, Any]:
    """As `watch` writes it; every event has an attempt."""
    columns = json.loads(json.dumps(finding.to_json()))
    of = {"finding_kind": columns.pop("kind"), "finding_ranks": columns.pop("ranks"), "kind": "finding"}
    return columns | of | ({"attempt": 7} if finding.attempt is None else {})


@pytest.mark.parametrize("attempt", [0, None])
def test_a_finding_survives_its_event_unchanged(attempt: int | None) -> None:
    (said,) = live_findings(run_with_nan(), LiveState(), 10**12)
    said = replace(said, attempt=attempt)
    assert Finding.of_event(as_event(said)) == said


@pytest.mark.parametrize("damage", [{"id": "another"}, {"finding_ranks": "x"}, {"evidence": 3}, {"first_step": "x"}])
def test_an_event_without_a_valid_finding_is_ignored(damage: dict[str, Any]) -> None:
    (said,) = live_findings(run_with_nan(), LiveState(), 10**12)
    event = as_event(said)
    assert remembered([event]) != {}
    assert remembered([event | damage, {"kind": "rank_state"}, {"kind": "finding"}, {}]) == {}


def test_a_replacement_watch_repeats_no_report_and_still_acts_on_a_hang() -> None:
    store, state = run_with_nan(), LiveState()
    said = live_findings(store, state, 10**12)
    assert said
    again = LiveState(reported=remembered(as_event(finding) for finding in said))
    assert told(store, again, 10**12) == []
    world, state = waiting_world(), LiveState()
    hang = live_findings(world.store, state, world.after(6))
    again = LiveState(reported=remembered(as_event(finding) for finding in hang))
    assert told(world.store, again, world.after(7)) == [("hang", "fired", (1,))]


def test_a_hang_that_watch_ended_is_not_reported_as_a_death() -> None:
    world, state = waiting_world(), LiveState()
    assert told(world.store, state, world.after(6)) == [("hang", "fired", (1,))]
    world.event("culprit_killed", 6.2, killed_rank=1, pid=3, reason="...")
    for rank in range(4):
        world.event("rank_state", 7.0, state_rank=rank, state="dead", os_state="")
    assert told(world.store, state, world.after(7)) == []
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(9))
    assert told(world.store, state, world.after(9) + 16 * STEP_NS) == []


def test_a_death_is_told_although_the_restart_was_quicker_than_a_tick() -> None:
    world, state = World(), LiveState()
    assert told(world.store, state, world.after(0.1)) == []
    world.event("rank_exit", 0.2, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=3, message="")
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(0.5))
    now_ns = world.after(0.5) + 16 * STEP_NS
    assert live_findings(world.store, state, now_ns) == []  # its last records may be on their way
    (finding,) = live_findings(world.store, state, now_ns)
    assert (finding.kind, finding.ranks, finding.attempt) == ("rank_lost", (1,), 0)
    assert "Restarted as attempt 1" in finding.summary
    assert told(world.store, state, now_ns) == []


def test_a_death_that_was_told_is_not_told_again_after_the_restart() -> None:
    world, state = World(), LiveState()
    world.event("rank_exit", 0.2, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=3, message="")
    assert told(world.store, state, world.after(0.6)) == [("rank_lost", "fired", (1,))]
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(9))
    assert told(world.store, state, world.after(9) + 16 * STEP_NS) == []


def test_a_clean_end_gives_no_finding() -> None:
    world, state = World(), LiveState()
    for rank in range(4):
        world.event("rank_closed", 0.1, rank=rank)
        world.event("rank_state", 0.4, state_rank=rank, state="dead", os_state="")
    assert told(world.store, state, world.after(30)) == []


def test_a_refused_step_is_told_once() -> None:
    store, state = run_with_nan(), LiveState()
    now_ns = max(row[0] for row in store.rows("SELECT max(start_ns) FROM steps"))
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": 4} for rank in range(4)])
    assert told(store, state, now_ns) == [("non_finite", "fired", (2,))]
    assert told(store, state, now_ns) == []


def all_batches_fail() -> MemoryStore:
    """Every rank's loss is NaN in step 12; nobody alone is to blame."""
    store = MemoryStore()
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": 4} for rank in range(4)])
    steps, calls = [], []
    for rank in range(4):
        for step in range(1, 13):
            loss = math.nan if step == 12 else 2.0
            row = {
                "attempt": 0,
                "rank": rank,
                "step": step,
                "start_ns": step * S,
                "duration_ns": S - 1,
                "batch_index": step,
            }
            steps.append(row | {"local_loss": loss, "loss": loss, "grad_norm": loss, "committed": step < 12})
            call = {"attempt": 0, "rank": rank, "step": step, "seq": step, "process_group": "dp[0,1,2,3]"}
            call |= {"op": "all_reduce", "issue_ns": step * S + 9, "end_ns": step * S + 10, "phase": "backward"}
            calls.append(call | {"nonfinite": step == 12})
    store.add("steps", steps)
    store.add("collectives", calls)
    return store


@pytest.mark.parametrize("missing", ["its end", "its row", "all of it"])
def test_a_nonfinite_loss_is_not_reported_before_all_ranks_are_read(missing: str) -> None:
    """Rank 0's records are read first, so those of the others may have what its own have not."""
    store, whole, state = all_batches_fail(), all_batches_fail(), LiveState()
    if missing == "its end":  # an open step has no loss yet
        values = "duration_ns = NULL, local_loss = NULL, loss = NULL, grad_norm = NULL"
        store.connection.execute(f"UPDATE steps SET {values} WHERE rank = 0 AND step = 12")
    else:
        store.connection.execute("DELETE FROM steps WHERE rank = 0 AND step = 12")
    if missing == "all of it":
        store.connection.execute("DELETE FROM collectives WHERE rank = 0 AND step = 12")
    assert told(store, state, 13 * S) == []
    assert told(whole, state, 14 * S) == [("non_finite", "fired", (0, 1, 2, 3))]


def test_ranks_that_were_given_up_are_not_lost_while_rank_0_still_writes_the_report() -> None:
    world, state = World(), LiveState()
    for rank in (1, 2, 3):
        world.event("rank_closed", 0.1, rank=rank)
        world.event("rank_exit", 0.2, exit_rank=rank, exit_code=3, signal=None, pid=3, message="", blamed=False)
        world.event("rank_state", 0.3, state_rank=rank, state="dead", os_state="")
    assert told(world.store, state, world.after(0.4)) == []
    assert told(world.store, state, world.after(2.5)) == []
    world.event("run_stopped", 0.5, rank=0, reason="...")
    world.event("rank_closed", 0.6, rank=0)
    world.event("rank_exit", 0.7, exit_rank=0, exit_code=3, signal=None, pid=3, message="", blamed=False)
    assert told(world.store, state, world.after(30)) == []


def straggling(until: int, steps: int) -> tuple[MemoryStore, int]:
    store = stored(simulate(3, steps=steps, faults=[Slow(rank=2, step=60, until=until, factor=1.4)]))
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": 4} for rank in range(4)])
    return store, store.rows("SELECT max(start_ns) FROM steps")[0][0]


def test_a_straggler_is_told_once_and_once_more_when_it_is_over() -> None:
    state = LiveState(policy=LivePolicy(periodic_ticks=1))
    store, now_ns = straggling(10**6, 80)
    assert told(store, state, now_ns, ticks=4) == [("straggler", "fired", (2,))]
    store, now_ns = straggling(80, 140)
    assert told(store, state, now_ns, ticks=4) == [("straggler", "ok", (2,))]
    assert told(store, state, now_ns, ticks=4) == []


def test_an_empty_store_is_no_error() -> None:
    assert told(MemoryStore(), LiveState(), 0) == []


def test_a_failing_analyzer_is_counted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world, state = waiting_world(), LiveState()
    monkeypatch.setattr("analyzers.numerics.nonfinite._episodes", lambda *_: 1 / 0)
    assert [finding.kind for finding in live_findings(world.store, state, world.after(6))] == ["hang"]
    assert state.errors == {"non_finite": 1}


def test_waiting_for_data_and_missing_saves_are_told_once_and_when_they_are_over() -> None:
    store = plain_run(steps=200)
    state = LiveState(policy=LivePolicy(periodic_ticks=1), manifest={"config": {"checkpoint": {"interval": 20}}})
    store.connection.execute("UPDATE steps SET data_ns = 80000000, duration_ns = 179000000 WHERE step > 100")
    store.connection.execute("DELETE FROM checkpoints WHERE step > 40; DELETE FROM events WHERE kind = 'run_ended'")
    now_ns = BEGIN_NS + 27 * S
    assert {finding.kind for finding in live_findings(store, state, now_ns)} == {"data_bound", "checkpoint_age"}
    assert live_findings(store, state, now_ns) == []
    save(store, 200, "verified")
    store.connection.execute("UPDATE steps SET data_ns = 1000000, duration_ns = 100000000")
    over = live_findings(store, state, now_ns)
    assert {(finding.kind, finding.status) for finding in over} == {("data_bound", "ok"), ("checkpoint_age", "ok")}


def test_steps_between_two_calls_are_all_judged_however_many_they_are() -> None:
    store = plain_run(steps=200)
    state = LiveState(policy=LivePolicy(window_steps=30))
    store.connection.execute("DELETE FROM events WHERE kind = 'run_ended'")
    store.connection.execute("CREATE TABLE later AS SELECT * FROM steps WHERE step > 40")
    store.connection.execute("DELETE FROM steps WHERE step > 40")
    assert live_findings(store, state, BEGIN_NS + 5 * S) == []
    store.connection.execute("INSERT INTO steps SELECT * FROM later")
    store.connection.execute("UPDATE steps SET nonfinite_count = 3, loss = 'nan' WHERE step = 60 AND rank = 1")
    found = live_findings(store, state, BEGIN_NS + 21 * S)
    assert [(finding.kind, finding.first_step) for finding in found if finding.kind == "non_finite"] == [
        ("non_finite", 60)
    ]


def test_periodic_analyses_keep_their_period_where_calls_are_rarer() -> None:
    store = plain_run(steps=200)
    store.connection.execute("UPDATE steps SET data_ns = 80000000, duration_ns = 179000000 WHERE step > 100")
    store.connection.execute("DELETE FROM events WHERE kind = 'run_ended'")
    state = LiveState(policy=LivePolicy(periodic_ticks=5))
    kinds = [{f.kind for f in record_findings(store, state, BEGIN_NS + 27 * S, num_ticks=3)} for _ in range(2)]
    assert kinds == [set(), {"data_bound"}]


def with_losses(store: MemoryStore, losses: Sequence[float], *, attempt: int = 0) -> None:
    """Steps from 1 of one rank that is in the store from now on."""
    if not store.rows("SELECT 1 FROM ranks WHERE attempt = ?", [attempt]):
        store.add("ranks", [{"attempt": attempt, "rank": 0, "wall_ns": 1, "world_size": 1}])
    begin_ns = (1 + attempt) * 10_000 * S
    done = store.rows("SELECT count(*) FROM steps WHERE attempt = ?", [attempt])[0][0]
    row = {"attempt": attempt, "rank": 0, "duration_ns": S - 1, "committed": True, "grad_norm": 1.0}
    store.add("steps", [
        row | {"step": step, "start_ns": begin_ns + step * S, "batch_index": step, "loss": loss}
        for step, loss in enumerate(losses[done:], done + 1)
    ])  # fmt: skip


def test_a_spike_that_fell_back_is_over() -> None:
    store, state = MemoryStore(), LiveState()
    losses = [one.loss for one in spike_observations()]
    losses[149] *= 2
    with_losses(store, losses[:150])
    (spike,) = record_findings(store, state, 10_151 * S)
    assert (spike.kind, spike.status, spike.first_step) == ("loss_spike", "fired", 150)
    with_losses(store, losses[:200])
    (over,) = record_findings(store, state, 10_201 * S)
    assert (over.identity, over.status, over.severity) == (spike.identity, "ok", "info")
    assert over.summary == f"Over: {spike.summary}"
    assert record_findings(store, state, 10_201 * S) == [], "neither again nor anew"


@pytest.mark.parametrize("num_before", [260, 600])
def test_the_next_watch_reports_once_what_happened_without_one(num_before: int) -> None:
    """In an attempt that has ended meanwhile, and before the newest steps of the one that runs."""
    losses = [one.loss for one in spike_observations(num_steps=600)]
    spiked = [loss * (2 if step == 150 else 1) for step, loss in enumerate(losses, 1)]
    store, state = MemoryStore(), LiveState()
    with_losses(store, spiked[:num_before])
    death = {"exit_rank": 0, "exit_code": -9, "signal": "SIGKILL", "pid": 3, "message": ""}
    exited = {"attempt": 0, "rank": -1, "wall_ns": 12_000 * S, "kind": "rank_exit", "detail": json.dumps(death)}
    store.add("events", [exited])
    with_losses(store, spiked, attempt=1)
    said = [one for _ in range(3) for one in record_findings(store, state, 20_601 * S)]
    assert sorted((one.kind, one.attempt, one.first_step) for one in said if one.kind != "checkpoint_age") == [
        ("loss_spike", 0, 150), ("loss_spike", 1, 150), ("rank_lost", 0, num_before),
    ]  # fmt: skip
    events = [
        {"attempt": f.attempt, "rank": -1, "wall_ns": 20_600 * S, "kind": "finding", "detail": json.dumps(as_event(f))}
        for f in said
    ]
    store.add("events", events)
    again = LiveState()
    assert [one for _ in range(3) for one in record_findings(store, again, 20_601 * S)] == [], (
        "the watch of another node has told it"
    )
