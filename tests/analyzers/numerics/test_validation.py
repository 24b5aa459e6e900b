"""Overfitting is found; noise, a plateau, a divergence and few evaluations are not. Every export has the loss."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from analyzers.figures import course, loss
from analyzers.numerics.loss.validation import overfitting
from analyzers.report.wording.explained import next_step, why
from analyzers.run.records.evaluations import evaluations
from analyzers.scope import Scope
from analyzers.verdict.run_facts import run_facts
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import assert_plain
from watch.exporting.metrics.run_samples import validation_samples
from watch.exporting.trackers.tracked_steps import TrackedSteps

EVERY = 20


def run(
    validation: Callable[[int], float], *, steps: int = 400, rate: float = -0.004, noise: float = 0.01
) -> MemoryStore:
    """A training loss that changes by `rate` a step, and an evaluation every 20 steps."""
    dice, store = random.Random(3), MemoryStore()
    store.add(
        "steps",
        [
            {
                "attempt": 0, "rank": 0, "step": step, "loss": 3.0 + rate * step + dice.gauss(0, 0.02),
                "committed": True, "start_ns": step * 10**9, "duration_ns": 10**9,
            }
            for step in range(1, steps + 1)
        ],
    )  # fmt: skip
    for step in range(EVERY, steps + 1, EVERY):
        value = validation(step) + dice.gauss(0, noise)
        sets = {"web": value - 0.1, "code": value + 0.1}
        store.event("evaluation", attempt=0, rank=0, step=step, wall_ns=step * 10**9, loss=value, sets=sets)
    return store


def turns_at(turn: int, rise: float = 0.0015) -> Callable[[int], float]:
    return lambda step: 3.0 - 0.004 * min(step, turn) + rise * max(0, step - turn)


@pytest.mark.parametrize("turn", [120, 200, 300])
def test_overfitting_is_found_from_the_lowest_evaluation_on(turn: int) -> None:
    (found,) = overfitting(run(turns_at(turn)), Scope())
    assert abs((found.first_step or 0) - turn) <= 2 * EVERY
    assert found.last_step == 400
    assert found.evidence["train_loss_now"] < found.evidence["train_loss_then"]
    for text in (found.summary, why(found), next_step(found)):
        assert_plain(text)


@pytest.mark.parametrize(
    ("store", "what"),
    [
        (run(turns_at(400)), "the validation loss falls"),
        (run(lambda step: 2.5, noise=0.05), "a plateau with noise"),
        (run(turns_at(200, 0.004), rate=0.004), "the training loss rises too: a divergence"),
        (run(turns_at(40), steps=80), "four evaluations do not show their noise"),
        (run(turns_at(360)), "two evaluations above the lowest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_else_is_overfitting(store: MemoryStore, what: str) -> None:
    assert overfitting(store, Scope()) == [], what


def test_a_step_that_was_evaluated_again_counts_as_the_last_time() -> None:
    store = run(turns_at(400), steps=60)
    store.event("evaluation", attempt=0, rank=0, step=40, loss=9.0, wall_ns=10**18)
    assert [(each.step, each.loss) for each in evaluations(store)][1] == (40, 9.0)
    assert [each.step for each in evaluations(store)] == [20, 40, 60]


def test_reports_pictures_metrics_and_trackers_have_the_same_number() -> None:
    store = run(turns_at(200))
    last = evaluations(store)[-1]
    facts = run_facts(store, {})["validation"]
    assert (facts["last_step"], facts["last_loss"]) == (400, round(last.loss, 5))
    assert facts["lowest_loss"] < facts["last_loss"]
    figure = loss.draw(course.loss_curve(store), evaluated=evaluations(store))
    (line,) = [trace for trace in figure.data if trace.name == "validation loss"]
    assert line.y[-1] == last.loss
    samples = {sample.labels["set"]: sample.value for sample in validation_samples(store)}
    assert samples[""] == last.loss
    assert samples["code"] == pytest.approx(last.loss + 0.1)
    tracked = {step.step: step.values for step in TrackedSteps(ranks="none").take(store, is_over=True)}
    assert tracked[400]["validation/loss"] == last.loss
    assert "validation/loss" not in tracked[399]


def test_evaluations_of_an_earlier_attempt_or_training_do_not_count() -> None:
    store = run(turns_at(500), steps=200)
    store.event("evaluation", attempt=1, rank=0, step=100, wall_ns=10**13, loss=9.0)
    assert [(one.step, one.attempt) for one in evaluations(store)] == [(20, 0), (40, 0), (60, 0), (80, 0), (100, 1)]
    store = run(turns_at(120), steps=400)
    assert overfitting(store, Scope()) != []
    store.event("training_began", attempt=0, rank=0, step=321)
    assert overfitting(store, Scope()) == []


@pytest.mark.parametrize("name", ["val_loss", "eval/loss", "Validation Loss"])
def test_an_attached_loop_logs_its_validation_loss_under_a_usual_name(name: str) -> None:
    store, logged = run(turns_at(200)), MemoryStore()
    recorded = evaluations(store)
    logged.add("steps", [
        dict(zip(("attempt", "rank", "step", "loss", "committed", "start_ns", "duration_ns"), row, strict=True))
        for row in store.rows("SELECT attempt, rank, step, loss, committed, start_ns, duration_ns FROM steps")
    ])  # fmt: skip
    logged.add("scalars", [
        {"attempt": 0, "rank": rank, "step": one.step, "name": of, "value": value}
        for one in recorded
        for rank, of, value in ((0, name, one.loss), (1, name, 9.0), (0, "val_accuracy", 0.5))
    ])  # fmt: skip
    assert [(one.step, one.loss) for one in evaluations(logged)] == [(one.step, one.loss) for one in recorded]
    (found,), (expected,) = overfitting(logged, Scope()), overfitting(store, Scope())
    assert found.summary == expected.summary
    assert [sample.value for sample in validation_samples(logged)] == [recorded[-1].loss]
