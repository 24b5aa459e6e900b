from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from analyzers.account import committed_steps as kept_steps
from analyzers.account import goodput
from analyzers.account.committed_steps import step_times
from analyzers.account.goodput import CATEGORIES, Account, measure
from analyzers.run.policy import StallPolicy
from analyzers.verdict.run_facts import run_facts
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.depth import tried
from tests.factories import make_run

MS = 1_000_000
S = 1_000_000_000


class Timeline:
    """A made-up store with a clock in milliseconds, whose truth is written down beside it."""

    def __init__(self, ranks: int = 2) -> None:
        self.store = MemoryStore()
        self.ranks = ranks

    def event(self, kind: str, at_ms: float, **detail: Any) -> None:
        self.store.event(kind, wall_ns=int(at_ms * MS) + S, **detail)

    def identity(self, at_ms: float, attempt: int = 0, hosts: Sequence[str] = (), **coordinates: Sequence[int]) -> None:
        rows = [
            {"attempt": attempt, "rank": rank, "wall_ns": int(at_ms * MS) + S, "world_size": self.ranks,
             "host": hosts[rank] if hosts else "a"} | {name: values[rank] for name, values in coordinates.items()}
            for rank in range(self.ranks)
        ]  # fmt: skip
        self.store.add("ranks", rows)

    def step(self, step: int, at_ms: float, ms: float | None, *, rank: int | None = None, attempt: int = 0,
             committed: bool = True, **phases_ms: float) -> None:  # fmt: skip
        for one in range(self.ranks) if rank is None else (rank,):
            row = {"attempt": attempt, "rank": one, "step": step, "start_ns": int(at_ms * MS) + S,
                   "duration_ns": None if ms is None else int(ms * MS), "committed": committed}  # fmt: skip
            self.store.add("steps", [row | {f"{name}_ns": int(value * MS) for name, value in phases_ms.items()}])

    def call(self, step: int, seq: int, issued_ms: Sequence[float], end_ms: float, attempt: int = 0) -> None:
        rows = [
            {"attempt": attempt, "rank": rank, "step": step, "seq": seq, "process_group": "world", "op": "all_reduce",
             "issue_ns": int(at * MS) + S, "end_ns": int(end_ms * MS) + S, "wait_ns": int((end_ms - at) * MS),
             "phase": "backward"}
            for rank, at in enumerate(issued_ms)
        ]  # fmt: skip
        self.store.add("collectives", rows)

    def span(self, kind: str, begin_ms: float, end_ms: float, *, rank: int, step: int, **more: Any) -> None:
        row = {"attempt": 0, "rank": rank, "step": step, "kind": kind, "start_ns": int(begin_ms * MS) + S,
               "end_ns": int(end_ms * MS) + S}  # fmt: skip
        self.store.add("spans", [row | more])

    def account(self, now_ms: float | None = None, floor_s: float = 5.0) -> Account:
        now_ns = None if now_ms is None else int(now_ms * MS) + S
        found = measure(self.store, StallPolicy(floor_s=floor_s), now_ns)
        assert found is not None
        adds_up(found)
        return found


def adds_up(account: Account) -> None:
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-6)
    for of_rank in account.by_rank.values():
        assert set(of_rank) == set(CATEGORIES)
        assert min(of_rank.values()) >= 0
        assert sum(of_rank.values()) == pytest.approx(account.wall_s, rel=1e-6)


def told(seconds: Mapping[str, float]) -> dict[str, float]:
    """Categories with something in them, in milliseconds."""
    return {name: round(value * 1000, 3) for name, value in seconds.items() if value > 1e-9}


def test_phases_start_and_end_of_a_plain_run() -> None:
    line = Timeline(ranks=1)
    line.event("run_started", 0)
    line.identity(100)
    for step in (1, 2):
        line.step(step, 400 + 210 * (step - 1), 200, data=20, forward=50, backward=80, optimizer=20, checkpoint=10,
                  evaluate=15)  # fmt: skip
    line.event("run_ended", 1000, reason="finished")
    account = line.account()
    assert account.wall_s == pytest.approx(1.0)
    assert told(account.seconds) == {
        "training": 300, "data": 40, "checkpoint": 20, "evaluation": 30, "startup": 400, "shutdown": 190, "other": 10,
        "unmeasured": 10,
    }  # fmt: skip
    assert account.goodput_ratio == pytest.approx(0.3)


def test_waits_are_transfer_for_the_last_and_lateness_of_a_peer_for_the_others() -> None:
    line = Timeline(ranks=3)
    line.event("run_started", 0)
    for rank, wait in enumerate((30, 10, 70)):
        line.step(1, 0, 100, rank=rank, forward=20, backward=80, backward_wait=wait, collective_wait=wait)
    line.call(1, 0, [70, 90, 30], 100)
    line.event("run_ended", 100, reason="finished")
    account = line.account()
    assert [told(account.by_rank[rank]) for rank in range(3)] == [
        {"training": 70, "communication": 10, "straggler": 20},
        {"training": 90, "communication": 10},
        {"training": 30, "communication": 10, "straggler": 60},
    ]
    assert account.basis == "collectives"
    line.store.drop("collectives")  # then the shortest wait of the step stands for the transfer
    again = line.account()
    assert again.basis == "steps"
    assert again.by_rank == account.by_rank


def test_steps_that_were_refused_or_rolled_back_are_discarded() -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    sequence = [(1, True), (2, True), (3, True), (4, False), (3, True), (4, True)]
    for number, (step, taken) in enumerate(sequence):
        line.step(step, 10 * number, 10, committed=taken, forward=10)
    line.event("run_ended", 60, reason="finished")
    account = line.account()
    assert told(account.seconds) == {"training": 40, "recomputed": 20}
    assert account.goodput_ratio == pytest.approx(40 / 60), "what was discarded is no progress"
    assert (account.num_kept, account.num_discarded) == (4, 2)


def test_a_killed_run_that_restarts() -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(10)
    for step in (1, 2, 3):
        line.step(step, 100 * step, 100, forward=100)
    line.step(4, 400, None)
    line.event("rank_exit", 450, exit_rank=1, exit_code=-9, signal="SIGKILL")
    line.identity(600, attempt=1)
    for step in (3, 4):
        line.step(step, 700 + 100 * (step - 3), 100, attempt=1, forward=100)
    line.event("run_ended", 950, reason="finished")
    account = line.account()
    # Step 3 ran twice; of step 4 nothing more was recorded than its begin.
    assert told(account.seconds) == {"training": 400, "recomputed": 100, "restart": 300, "startup": 100, "shutdown": 50}


@pytest.mark.parametrize("killed", [True, False])
def test_the_time_between_two_launches_is_in_no_class(killed: bool) -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0, node_rank=0)
    line.event("run_started", 5, node_rank=1)
    line.identity(10)
    for step in (1, 2):
        line.step(step, 100 * step, 100, forward=100)
    if not killed:
        line.event("run_ended", 350, reason="preempted", node_rank=0)
        line.event("run_ended", 340, reason="preempted", node_rank=1)
    line.event("run_started", 5000, node_rank=0)
    line.event("run_started", 5300, node_rank=1)  # joins what is under way
    line.identity(5050, attempt=1)
    line.step(3, 5200, 100, attempt=1, forward=100)
    line.step(4, 5300, 100, attempt=1, forward=100)
    line.event("run_ended", 5450, reason="finished", node_rank=0)
    line.event("run_ended", 5440, reason="finished", node_rank=1)
    account = line.account()
    assert account.wall_s == pytest.approx(5.45)
    restart = 200 if killed else 250
    stopped = {"startup": 100, "training": 400, "restart": restart, "stopped": 4900 - restart, "shutdown": 50}
    assert told(account.seconds) == stopped


@pytest.mark.parametrize("restarts", [True, False])
def test_a_hang_lasts_from_the_last_record_until_its_culprit_is_killed(restarts: bool) -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0)
    line.step(1, 0, 100, forward=100)
    line.step(2, 100, None)
    line.store.add("collectives", [{"attempt": 0, "rank": 0, "step": 2, "seq": 0, "process_group": "world",
                                    "op": "all_reduce", "issue_ns": 150 * MS + S}])  # fmt: skip
    line.event("culprit_killed", 10_000, killed_rank=1)
    if restarts:
        line.step(2, 12_000, 100, attempt=1, forward=100)
    line.event("run_ended", 12_100, reason="finished" if restarts else "failed")
    found = told(line.account().seconds)
    end = {"training": 200, "restart": 2000} if restarts else {"training": 100, "shutdown": 2100}
    assert found == {"recomputed": 50, "hang": 9850} | end


@pytest.mark.parametrize("leaves", ["step", "between", "killed"])
@pytest.mark.parametrize("reason", ["interrupted", "failed", "given_up", ""])
def test_a_reported_hang_keeps_its_time_however_the_run_is_stopped(leaves: str, reason: str) -> None:
    """A rank that is interrupted leaves its step, or stands between two: neither is training, nor the shutdown."""
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0)
    line.step(1, 0, 100, forward=100)
    if leaves != "between":
        line.step(2, 100, None if leaves == "killed" else 59_900, rank=0, backward=59_900, backward_wait=50_000)
    line.store.add("collectives", [{"attempt": 0, "rank": 0, "step": 2, "seq": 0, "process_group": "world",
                                    "op": "all_reduce", "issue_ns": 100 * MS + S}])  # fmt: skip
    line.event("finding", 6_000, finding_kind="hang", status="fired")
    line.event("rank_exit", 60_000, exit_rank=0, exit_code=-9, signal="SIGKILL")
    if reason:
        line.event("run_ended", 60_500, reason=reason)
    account = line.account()
    end = {"shutdown": 500} if reason else {}
    assert told(account.seconds) == {"training": 100, "hang": 59_900} | end
    assert account.num_kept == 1
    facts = run_facts(line.store, {})
    assert (facts["steps"], facts["step_ms_median"]) == (1, 100)


def test_silence_of_a_live_run_is_training_and_then_a_hang() -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0)
    line.step(1, 0, 100, forward=100)
    line.step(2, 100, None)
    assert told(line.account(now_ms=600).seconds) == {"training": 600}
    assert told(line.account(now_ms=9000).seconds) == {"training": 100, "hang": 8900}


def test_saves_between_steps_and_at_the_end_are_checkpoint() -> None:
    line = Timeline(ranks=1)
    line.event("run_started", 0)
    line.step(1, 100, 100, forward=100)
    line.span("checkpoint", 210, 240, rank=0, step=1)
    line.step(2, 250, 100, forward=90, checkpoint=10)
    line.span("checkpoint", 300, 310, rank=0, step=2)  # inside the step, whose column has it
    line.span("checkpoint", 360, 400, rank=0, step=2)
    line.event("run_ended", 450, reason="finished")
    assert told(line.account().seconds) == {"training": 190, "checkpoint": 80, "startup": 100, "shutdown": 60,
                                            "other": 20}  # fmt: skip


def test_a_pipelines_idle_time_is_bubble() -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0, pp=(0, 1))
    for stage in (0, 1):
        begin = 10 * stage  # of the four slots of a microbatch each stage computes in two
        line.span("forward", begin, begin + 10, rank=stage, step=1, stage=stage, microbatch=0)
        line.span("backward", 40 - 20 * stage - (10 - begin), 50 - 20 * stage - (10 - begin), rank=stage, step=1,
                  stage=stage, microbatch=0)  # fmt: skip
        line.step(1, 0, 40, rank=stage, forward=10, backward=10)
    line.event("run_ended", 40, reason="finished")
    for of_rank in line.account().by_rank.values():
        assert told(of_rank) == {"training": 20, "bubble": 20}


def test_clocks_of_other_hosts_are_shifted() -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0, hosts=("a", "b"))
    for rank, ahead in ((0, 0), (1, 3_600_000)):
        line.step(1, 100 + ahead, 100, rank=rank, forward=100)
    line.event("run_ended", 250, reason="finished")
    account = line.account()
    assert told(account.by_rank[0]) == told(account.by_rank[1]) == {"training": 100, "startup": 100, "shutdown": 50}


def test_a_loop_that_records_only_steps() -> None:
    line = Timeline(ranks=2)
    for step in (1, 2):
        line.step(step, 100 * step, 80, rank=0, collective_wait=30)
        line.step(step, 100 * step, 80, rank=1, collective_wait=10)
    account = line.account()
    assert told(account.by_rank[0]) == {"unmeasured": 100, "communication": 20, "straggler": 40, "other": 20}
    assert account.goodput_ratio is None  # what was not measured is no training, and no lack of it


def test_without_records_there_is_no_account() -> None:
    assert measure(MemoryStore()) is None
    (finding,) = goodput.analyze(MemoryStore())
    assert (finding.status, "steps" in finding.summary) == ("insufficient_data", True)
    line = Timeline()
    line.step(1, 0, 10, forward=10)
    assert told(line.account().seconds) == {"training": 10}
    (finding,) = goodput.analyze(line.store)  # nobody says when it began and ended
    assert "Start-up" in finding.summary


@pytest.mark.parametrize("seed", range(tried(3, nightly=6)))
def test_whatever_was_recorded_adds_up(seed: int) -> None:
    dice = random.Random(seed)
    line = Timeline(ranks=3)
    line.event("run_started", dice.uniform(0, 200))
    at, step = dice.uniform(0, 500), 1
    for attempt in range(3):
        line.identity(at, attempt=attempt, hosts=("a", "b", "a"))
        for _ in range(8):
            ms = dice.uniform(5, 50)
            for rank in range(3):
                parts = {name: dice.uniform(0, ms) for name in ("data", "forward", "backward_wait", "collective_wait")}
                skewed = at + (dice.choice((0, 9000)) if rank == 1 else 0)
                line.step(step, skewed, dice.choice((ms, ms, ms, None)), rank=rank, attempt=attempt,
                          committed=dice.random() < 0.8, **parts)  # fmt: skip
            at += ms + dice.uniform(0, 5)
            step = max(1, step + dice.choice((1, 1, 1, 1, -3)))
        line.event("rank_exit", at + dice.uniform(-20, 20), attempt=attempt, exit_rank=1, exit_code=1)
        at += dice.uniform(0, 9000)
    line.account()


def test_a_very_long_run_sums_every_kth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    sequence = [*range(1, 61), *range(51, 121)]  # 51 to 60 ran twice
    for number, step in enumerate(sequence):
        line.step(step, 10 * number, 10, data=1, forward=6, backward=3, backward_wait=1, collective_wait=1)
    line.event("run_ended", 10 * len(sequence) + 50, reason="finished")
    whole = line.account()
    monkeypatch.setattr(kept_steps, "MAX_ROWS", 2 * len(sequence) // 4)
    thinned = line.account()
    assert told(whole.seconds) == pytest.approx(told(thinned.seconds), rel=0.02)
    assert thinned.num_discarded == whole.num_discarded == 10
    assert thinned.num_kept == pytest.approx(whole.num_kept, abs=4)


def test_sums_equal_those_over_every_row(tmp_path: Path) -> None:
    """Steps that ran twice are found from one rank's sequence, and the same as by looking at all."""
    run = make_run(tmp_path, ranks=3, steps=40, nan={1: 12})
    make_run(tmp_path, ranks=3, steps=30, run=run, attempt=1, first_step=31)
    with Store.open(run) as store:
        times = step_times(store)
        assert [of.kept.num_steps for of in times.values()] == [29, 29, 29, 30, 30, 30]
        assert [of.num_discarded for of in times.values()] == [11, 11, 11, 0, 0, 0]
        account = measure(store)
    assert account is not None
    adds_up(account)
    assert account.basis == "collectives"
    assert account.seconds["training"] > account.seconds["communication"] > 0
