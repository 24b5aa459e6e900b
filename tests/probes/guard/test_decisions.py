"""The guard's verdicts and its ladder: what is skipped, how far back, when the rate is lowered, when it stops."""

from __future__ import annotations

import math

import pytest

from probes.guard.decisions import Guard, GuardPolicy, RunStopped, Verdict
from probes.guard.ledger import Ledger
from trainer.checkpoint.state import Position

BAD = (math.nan, math.inf, -math.inf)


def trained(guard: Guard, steps: range) -> None:
    """Healthy steps, each on the batch of its number less one."""
    for step in steps:
        assert guard.judge(step, 4.0 - 0.001 * step + 0.01 * (step % 3), 1.0).healthy
        guard.taken(Position(step=step, batch_index=step), step - 1)


def failure(step: int) -> Verdict:
    return Verdict(step=step, kind="non_finite", reason=f"step {step}")


@pytest.mark.parametrize("value", BAD)
def test_a_nonfinite_value_is_refused_and_never_learned_from(value: float) -> None:
    guard = Guard(Ledger(), max_rollbacks=8)
    trained(guard, range(1, 6))
    before = guard.state()
    for loss, norm in ((value, 1.0), (4.0, value)):
        verdict = guard.judge(6, loss, norm)
        assert (verdict.kind, verdict.step) == ("non_finite", 6)
    assert guard.state() == before


def test_a_spike_is_refused_with_its_numbers() -> None:
    guard = Guard(Ledger(), max_rollbacks=8)
    trained(guard, range(1, 41))
    verdict = guard.judge(41, 9.0, 20.0)
    assert verdict.kind == "spike"
    assert "9.000" in verdict.reason
    assert "robust sigmas" in verdict.reason


def test_a_guard_that_is_off_refuses_only_what_is_not_finite() -> None:
    guard = Guard(Ledger(), max_rollbacks=8, enabled=False)
    trained(guard, range(1, 41))
    assert guard.judge(41, 9.0, 20.0).healthy
    assert not guard.judge(42, math.nan, 1.0).healthy


def test_a_batch_is_trained_again_once_where_the_repeated_step_was_good() -> None:
    guard = Guard(Ledger(), max_rollbacks=100)
    trained(guard, range(1, 21))
    batches = [guard.decide(failure(step), step - 1, is_transient=True).batches for step in (21, 21, 22, 23, 23)]
    assert batches[:4] == [(), (20,), (), ()]
    assert batches[4][-1] == 22, "it failed again"
    with pytest.raises(RunStopped):
        guard.decide(failure(24), 23, is_transient=True)


def test_repeated_failures_climb_the_ladder() -> None:
    """Three times the batch alone, then windows and a lower rate, then the end."""
    ledger = Ledger()
    guard = Guard(ledger, max_rollbacks=100)
    trained(guard, range(1, 21))
    decisions = [guard.decide(failure(21), 20 + number) for number in range(5)]
    assert [decision.batches for decision in decisions] == [
        (20,),
        (21,),
        (22,),
        (17, 18, 19, 23),
        (13, 14, 15, 16, 17, 18, 19, 24),
    ]
    assert [decision.before_step for decision in decisions] == [21, 21, 21, 18, 14]
    assert [decision.rate_scale for decision in decisions] == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert ledger.rate_at(21 + 50) == 0.25
    assert ledger.rate_at(21 + 51) == 1.0
    with pytest.raises(RunStopped, match="6 failures in a row"):
        guard.decide(failure(21), 25)
    assert "6 failures" in ledger.stopped


def test_an_incident_ends_with_enough_quiet_steps() -> None:
    ledger = Ledger()
    guard = Guard(ledger, max_rollbacks=100, policy=GuardPolicy(quiet_steps=5))
    trained(guard, range(1, 11))
    guard.decide(failure(11), 10)
    guard.on_rollback(8)
    trained(guard, range(9, 16))
    assert ledger.failures == 1, "step 15 is not yet five beyond the failing one"
    trained(guard, range(16, 17))
    assert ledger.failures == 0


def test_the_budget_of_the_whole_run_is_kept() -> None:
    ledger = Ledger(rollbacks=8)
    guard = Guard(ledger, max_rollbacks=8)
    with pytest.raises(RunStopped, match=r"max_rollbacks = 8"):
        guard.decide(failure(5), 4)


def test_rolled_back_steps_are_not_in_a_window() -> None:
    guard = Guard(Ledger(), max_rollbacks=8, policy=GuardPolicy(windows=(1, 4)))
    trained(guard, range(1, 11))
    guard.on_rollback(3)
    guard.decide(failure(4), 3)
    assert guard.decide(failure(4), 4).batches == (0, 1, 2, 4)


def test_ranks_agree_whatever_their_local_values() -> None:
    """The guard has no other input than reduced values: two of them never part."""
    one, other = (Guard(Ledger(), max_rollbacks=8) for _ in range(2))
    for guard in (one, other):
        trained(guard, range(1, 31))
    losses = [4.0, 9.0, math.nan, 3.9]
    assert [one.judge(31, loss, 1.0) for loss in losses] == [other.judge(31, loss, 1.0) for loss in losses]


def corrupted(step: int, *devices: str) -> Verdict:
    ranks = tuple(range(len(devices)))
    return Verdict(step=step, kind="corruption", reason="a bit", healthy_step=8, devices=devices, ranks=ranks)


def test_corruption_skips_no_batch_and_lowers_no_rate() -> None:
    ledger = Ledger()
    guard = Guard(ledger, max_rollbacks=8)
    trained(guard, range(1, 12))
    decisions = [guard.decide(corrupted(12, f"host cuda:{number}"), 11) for number in range(5)]
    assert {decision.batches for decision in decisions} == {()}
    assert {decision.before_step for decision in decisions} == {9}, "the newest state that was found healthy, or older"
    assert {decision.rate_scale for decision in decisions} == {1.0}
    with pytest.raises(RunStopped, match="6 failures in a row"):
        guard.decide(corrupted(12, "host cuda:7"), 11)


def test_the_second_corruption_on_a_device_ends_the_run() -> None:
    ledger = Ledger()
    guard = Guard(ledger, max_rollbacks=8)
    trained(guard, range(1, 12))
    guard.decide(corrupted(12, "host cuda:1"), 11)
    guard.decide(corrupted(12, "host cuda:2"), 11)
    guard.decide(corrupted(12), 11)
    later = Ledger.from_json(ledger.to_json())  # as a restarted run finds it
    with pytest.raises(RunStopped, match="replace host cuda:1: state was corrupted on it 2 times"):
        Guard(later, max_rollbacks=8).decide(corrupted(500, "host cuda:1"), 499)


def test_a_corrupted_state_is_judged_before_its_loss_until_it_is_gone() -> None:
    guard = Guard(Ledger(), max_rollbacks=8)
    before = guard.state()
    guard.report_corruption(corrupted(12, "host cuda:1"))
    assert guard.judge(12, math.nan, 1.0).kind == "corruption"
    assert guard.judge(12, 4.0, 1.0).kind == "corruption"
    assert guard.state() == before, "nothing is learnt from it"
    guard.on_rollback(8)
    assert guard.judge(9, 4.0, 1.0).healthy
