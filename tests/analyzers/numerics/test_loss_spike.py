from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.numerics.loss.divergence import divergence
from analyzers.numerics.loss.loss_spike import Observation, _finding, find_spikes, loss_spikes
from analyzers.run.findings.open_findings import why_closed
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from probes.guard.spike_detector import SpikeDetector, SpikeVerdict
from probes.tape import event_kinds
from tests.analyzers.memory_store import MemoryStore
from tests.probes.guard.test_spike_detector import training_curve
from tests.sentences import plain


def spikes(store: MemoryStore, **scope: int) -> list[Finding]:
    return plain(loss_spikes(store, Scope(**scope)))  # type: ignore[arg-type]


def observations(seed: int = 0, **curve: float) -> list[Observation]:
    loss, norm = training_curve(seed, noise=0.03, **curve)  # type: ignore[arg-type]
    return [Observation(0, i + 1, loss[i], norm[i], 1e-3, i, True) for i in range(len(loss))]


def changed(seen: list[Observation], first: int, last: int, factor: float, **columns: float) -> list[Observation]:
    hit = range(first, last + 1)
    values = {"grad_norm": 3.0} | columns
    return [
        Observation(
            o.attempt, o.step, o.loss * factor, values["grad_norm"], columns.get("lr", o.lr), o.batch_index, True
        )
        if o.step in hit
        else o
        for o in seen
    ]


def test_one_bad_batch() -> None:
    (spike,) = find_spikes(changed(observations(), 150, 150, 2.0))
    assert ([v.step for v in spike.verdicts], spike.cause) == ([150], "batch")


@pytest.mark.parametrize(("last", "is_over"), [(400, True), (154, True), (150, False)])
def test_a_spike_is_over_once_the_loss_was_seen_to_come_back(last: int, is_over: bool) -> None:
    (found,) = spikes(stored(changed(observations(), 150, 150, 2.0)[:last]))
    assert found.evidence.get("ongoing") is (False if is_over else None)
    assert why_closed(found, 0) == ("over" if is_over else "")
    assert "fallen back" not in found.summary, "one step explains itself"


def test_a_loss_that_stays_up_is_not_over() -> None:
    (found,) = spikes(stored(changed(observations(), 150, 400, 2.5)))
    assert not why_closed(found, 0)


def test_a_return_from_easy_batches_is_no_spike() -> None:
    level = observations()
    assert find_spikes(changed(level, 250, 258, 0.3, grad_norm=1.0)) == []
    (spike,) = find_spikes(changed(changed(level, 250, 258, 0.3, grad_norm=1.0), 262, 262, 2.5))
    assert 262 in [verdict.step for verdict in spike.verdicts]


def test_a_spike_of_several_steps_is_one() -> None:
    (spike,) = find_spikes(changed(observations(), 150, 153, 2.0))
    assert (spike.verdicts[0].step, spike.verdicts[-1].step, spike.cause) == (150, 153, "batch")


def test_divergence() -> None:
    (spike,) = find_spikes(changed(observations(), 150, 400, 2.5))
    assert (spike.verdicts[0].step, spike.cause) == (150, "divergence")


@pytest.mark.parametrize(("after", "cause"), [(200, "batch"), (90, "batch"), (0, "divergence")])
def test_a_rise_that_fell_back_is_no_divergence(after: int, cause: str) -> None:
    """One step's loss 200 times as high, and then a decay over tens of steps, as of weights that a batch has spoilt."""
    seen = observations()
    for i in range(149, 200 + after if after else len(seen)):
        factor = 200.0 if i == 149 else 1 + 6 * math.exp(-(i - 149) / 25) if after else 7.0
        seen[i] = replace(seen[i], loss=seen[i].loss * factor, grad_norm=3.0)
    (spike,) = find_spikes(seen[: 200 + after] if after else seen)
    assert (spike.verdicts[0].step, spike.cause) == (150, cause)
    assert len(spike.indices) >= 8
    assert spike.after is not None
    assert spike.after.has_fallen == (cause == "batch")
    finding = _finding(seen, spike, EventLog.load(MemoryStore(), ()))
    assert finding.severity == ("warning" if cause == "batch" else "critical")
    assert ("stayed high" in finding.summary) == (cause == "divergence")
    assert "%" not in finding.summary  # a factor is said where it is large
    if spike.after.back_at is not None:
        assert (
            f"at step 150 on batch 149 and was back below its earlier level by step {spike.after.back_at}"
            in finding.summary
        )


def test_a_jump_of_the_learning_rate() -> None:
    seen = observations()
    seen[148] = Observation(0, 149, seen[148].loss, seen[148].grad_norm, 0.1, 148, True)
    (spike,) = find_spikes(changed(seen, 150, 152, 2.0))
    assert spike.cause == "learning_rate"


@pytest.mark.parametrize("seed", range(5))
def test_warm_up_and_decay_of_the_rate_are_silent(seed: int) -> None:
    seen = observations(seed)
    rates = [1e-3 * min(1.0, o.step / 40) * (0.1 + 0.9 * (1 + math.cos(math.pi * o.step / 400)) / 2) for o in seen]
    assert find_spikes([Observation(0, o.step, o.loss, o.grad_norm, r) for o, r in zip(seen, rates, strict=True)]) == []


def stored(seen: list[Observation], ranks: int = 2) -> MemoryStore:
    store = MemoryStore()
    for rank in range(ranks):
        store.add_columns(
            "steps",
            attempt=np.array([o.attempt for o in seen], np.int32),
            rank=np.full(len(seen), rank, np.int32),
            step=np.array([o.step for o in seen]),
            start_ns=np.arange(len(seen)) * 1_000_000,
            duration_ns=np.full(len(seen), 900_000),
            loss=np.array([o.loss for o in seen]),
            grad_norm=np.array([o.grad_norm for o in seen]),
            lr=np.array([o.lr or 0.0 for o in seen]),
            batch_index=np.array([o.batch_index or 0 for o in seen]),
            committed=np.array([bool(o.committed) for o in seen]),
        )
    return store


def rolled_back() -> list[Observation]:
    """A spike at step 150 is refused; the run goes on from step 140 with other batches."""
    seen = changed(observations(), 150, 150, 2.0)
    bad = seen[149]
    refused = Observation(0, 150, bad.loss, bad.grad_norm, bad.lr, bad.batch_index, False)
    again = [
        Observation(0, o.step, o.loss, o.grad_norm, o.lr, (o.batch_index or 0) + 10, True) for o in observations()[140:]
    ]
    return [*seen[:149], refused, *again]


def test_the_finding_names_batch_and_response() -> None:
    store = stored(rolled_back())
    store.event("rollback", rank=0, step=150, from_step=150, to_step=140, tier="memory", reason="loss_spike",
                skipped_batches=[149], duration_s=0.1)  # fmt: skip
    (finding,) = spikes(store)
    assert (finding.kind, finding.first_step, finding.last_step) == ("loss_spike", 150, 150)
    assert (finding.cause, finding.severity) == ("batch", "warning")
    assert finding.evidence["batch_indices"] == [149]
    assert "on batch 149" in finding.summary
    assert finding.summary.endswith("Rolled back to step 140 from memory in 0.1 s and skipped batch 149.")


def test_a_post_mortem_gives_the_live_verdicts_again() -> None:
    seen = rolled_back()
    detector = SpikeDetector()
    live = [o.step for o in seen if detector.observe(o.step, o.loss, o.grad_norm).is_spike]
    assert live == [f.first_step for f in spikes(stored(seen))]


def test_the_live_window_says_nothing_that_the_whole_run_does_not() -> None:
    for seed in range(10):
        assert spikes(stored(observations(seed), ranks=1), since_step=100) == []
    (finding,) = spikes(stored(changed(observations(), 380, 380, 2.0)), since_step=100)
    assert finding.first_step == 380


def test_an_outlier_in_one_rank_of_an_attached_loop_is_weighed_with_the_others() -> None:
    """Each rank records the loss of its own batch; gradients are of all of them."""
    store = stored(changed(observations(), 150, 150, 1.0), ranks=8)
    store.connection.execute("UPDATE steps SET loss = loss * 1.5 WHERE step = 150 AND rank = 0")
    assert spikes(store) == []
    store.connection.execute("UPDATE steps SET loss = loss * 2 WHERE step = 150")
    (finding,) = spikes(store)
    ((mean,),) = store.rows("SELECT avg(loss) FROM steps WHERE step = 150")
    assert finding.evidence["loss"] == pytest.approx(mean, rel=1e-4)


def test_the_newest_steps_wait_for_the_records_of_all_ranks() -> None:
    store = stored(changed(observations(), 150, 150, 2.0))
    store.connection.execute("DELETE FROM steps WHERE step > 150 OR (rank = 1 AND step = 150)")
    assert spikes(store) == []
    store = stored(changed(observations(), 150, 150, 2.0))
    store.connection.execute("DELETE FROM steps WHERE step > 160 OR (rank = 1 AND step >= 150)")  # it has ended
    assert [found.first_step for found in spikes(store)] == [150]


def test_the_live_window_knows_how_high_the_loss_was_at_the_start() -> None:
    """A rise of what little is left of the loss is none, live as after the end."""
    seen = changed(observations(), 380, 380, 1.5)
    seen = [Observation(0, o.step, o.loss * (1.0 if o.step < 40 else 1e-3), o.grad_norm, o.lr) for o in seen]
    assert spikes(stored(seen)) == []
    assert spikes(stored(seen), since_step=100) == []


def test_a_run_without_a_loss_is_not_judged() -> None:
    assert [f.status for f in spikes(MemoryStore())] == ["insufficient_data"]


@pytest.mark.parametrize("kinds", [("generation", "reward"), ("environment",)])
def test_the_loss_of_a_policy_is_not_judged(kinds: tuple[str, ...]) -> None:
    store = MemoryStore()
    losses = [0.01 * (-1) ** step for step in range(150)] + [40.0] * 50
    store.add(
        "steps",
        [
            {"attempt": 0, "rank": 0, "step": step, "start_ns": step, "loss": loss, "committed": True}
            for step, loss in enumerate(losses, start=1)
        ],
    )
    assert [found.status for found in loss_spikes(store, Scope())] == ["fired"]
    store.add("spans", [{"attempt": 0, "rank": 0, "step": 1, "kind": kind, "start_ns": 1} for kind in kinds])
    (found,) = loss_spikes(store, Scope())
    assert found.status == "insufficient_data"
    assert "policy" in found.summary
    assert divergence(store, Scope()) == []


def test_the_losses_of_models_trained_in_turn_are_not_judged() -> None:
    store = MemoryStore()
    rows = [
        {"attempt": 0, "rank": 0, "step": step, "start_ns": step, "loss": 0.7 if step < 150 else 3.0, "committed": True}
        for step in range(1, 201)
    ]
    store.add("steps", rows)
    assert [found.status for found in loss_spikes(store, Scope())] == ["fired"]
    store.add("events", [{"attempt": 0, "rank": 0, "kind": event_kinds.TRAINED_IN_TURN, "wall_ns": 1}])
    assert [found.status for found in loss_spikes(store, Scope())] == ["insufficient_data"]
    assert divergence(store, Scope()) == []


def restarted(seen: list[Observation], at: int, *, since: int = 1, like: int | None = None) -> list[Observation]:
    """After step `at` another attempt goes on from step `since`, with the losses from step `like` on."""
    again = observations(seed=7)[(since if like is None else like) - 1 :]
    return [*seen[:at], *(replace(o, attempt=1, step=since + i, batch_index=900 + i) for i, o in enumerate(again))]


@pytest.mark.parametrize("at", [120, 299])
@pytest.mark.parametrize("since", [1, 2, 20, 60])
def test_a_restart_has_the_losses_of_the_step_it_goes_on_from(since: int, at: int) -> None:
    """Without a checkpoint from the beginning, with one from its step: no series with what ran before."""
    seen = restarted(observations(), at, since=since)
    assert max(o.loss for o in seen[at : at + 9]) > 1.5 * seen[at - 1].loss or since == 60
    assert find_spikes(seen) == []


def test_weights_that_were_lost_in_a_restart_are_a_spike() -> None:
    (spike, *_) = find_spikes(restarted(observations(), 299, since=200, like=1))
    assert (spike.verdicts[0].step, spike.cause) == (200, "divergence")


def test_a_bad_batch_after_a_restart_is_found_by_the_level_of_its_own_attempt() -> None:
    seen = restarted(observations(), 299)
    assert find_spikes(changed(seen, 0, 0, 1.0)) == []
    seen[299 + 39] = replace(seen[299 + 39], loss=2.5 * seen[299 + 39].loss, grad_norm=9.0)
    (spike,) = find_spikes(seen)
    assert (spike.verdicts[0].step, spike.cause) == (40, "batch")


def test_a_learning_rate_before_the_restart_does_not_explain_a_spike_after_it() -> None:
    before = [replace(o, lr=1e-5) for o in observations()[:299]]  # decayed
    seen = restarted(before, 299)
    seen[299 + 19] = replace(seen[299 + 19], loss=3 * seen[299 + 19].loss, grad_norm=9.0)
    (spike,) = find_spikes(seen)
    assert (spike.verdicts[0].step, spike.cause) == (20, "batch")


def second_training() -> list[Observation]:
    first, second = observations()[:300], observations(seed=7)
    return [*first, *(replace(o, step=300 + o.step) for o in second)]


def test_another_training_in_the_same_process_is_no_spike_of_the_first() -> None:
    store = stored(second_training())
    assert [finding.first_step for finding in spikes(store)] == [301]
    store.event("training_began", rank=0, step=301)
    assert spikes(store) == []


def test_a_rollback_goes_back_in_the_history_as_the_live_detector_does() -> None:
    seen = rolled_back()
    live = SpikeDetector()
    states: dict[int, dict[str, Any]] = {}
    verdicts: list[SpikeVerdict] = []
    for i, o in enumerate(seen):
        if i and o.step <= seen[i - 1].step:
            live.load_state_dict(states[o.step - 1])
        verdicts.append(live.observe(o.step, o.loss, o.grad_norm))
        states[o.step] = live.state_dict()
    expected = [verdict for verdict in verdicts if verdict.is_spike]
    assert [verdict for spike in find_spikes(seen) for verdict in spike.verdicts] == expected
