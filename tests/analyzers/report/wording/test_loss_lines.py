"""The sentence on the loss: never two directions in one line, and no end for a loss that was lost."""

from __future__ import annotations

import random

import pytest

from analyzers.report.wording.loss_lines import loss_line
from analyzers.verdict.run_facts import run_facts
from tests.analyzers.memory_store import MemoryStore


def run(losses: list[float]) -> MemoryStore:
    store = MemoryStore()
    store.add(
        "steps",
        [
            {
                "attempt": 0, "rank": 0, "step": step, "loss": loss, "committed": True,
                "start_ns": step * 10**9, "duration_ns": 10**9,
            }
            for step, loss in enumerate(losses, 1)
        ],
    )  # fmt: skip
    return store


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_stays_nonfinite_is_reported_with_its_first_step(bad: float) -> None:
    losses = [3.0 - step / 50 for step in range(30)]
    facts = run_facts(run([*losses, *[bad] * 10]), {})
    assert facts["last_loss"] == pytest.approx(2.42)
    assert facts["loss_lost_at_step"] == 31
    assert loss_line(facts) == (
        "3.0000 at the start, 2.4200 at the last finite step. NaN or Inf from step 31 to the end."
    )


def test_a_step_that_is_not_finite_and_healed_is_no_lost_loss() -> None:
    losses = [3.0 - step / 50 + 0.01 * (step % 2) for step in range(30)]
    losses[12] = float("nan")
    facts = run_facts(run(losses), {})
    assert facts["loss_lost_at_step"] is None
    assert "2.4300 at the end. Between the first and the last tenth it fell by" in loss_line(facts)


def test_a_change_within_the_noise_has_no_direction() -> None:
    dice = random.Random(5)
    losses = [2.3 + dice.gauss(0, 0.05) for _ in range(100)]
    facts = run_facts(run(losses), {})
    assert abs(facts["loss_drop_in_noise"]) < 1
    assert loss_line(facts).endswith("Between the first and the last tenth it changed by less than its noise.")


def test_the_loss_of_a_policy_has_no_direction() -> None:
    store = run([20.0 + step / 10 for step in range(60)])
    store.add("spans", [{"attempt": 0, "rank": 0, "step": 1, "kind": "environment"}])
    assert loss_line(run_facts(store, {})) == "20.0000 at the start, 25.9000 at the end"


def test_a_single_loss_is_printed_once() -> None:
    assert loss_line({"first_loss": 4.1, "last_loss": 4.1}) == "4.1000 at the start and at the end"


def test_one_printed_loss_is_neither_a_start_nor_an_end() -> None:
    facts = {"first_loss": 4.1, "last_loss": 4.1, "logs": {"printed_losses": 1}}
    assert loss_line(facts) == "4.1000 in the only line that prints it"


@pytest.mark.parametrize(("scale", "told"), [
    (1e-3, "0.0060 at the start, 0.0012 at the end. Between the first and the last tenth it fell by 0.0044, "),
    (1e-5, "6e-05 at the start, 1e-05 at the end. Between the first and the last tenth it fell by 4e-05, "),
])  # fmt: skip
def test_a_small_loss_and_its_change_are_not_rounded_to_zero(scale: float, told: str) -> None:
    losses = [scale * (6.0 - step * 4.8 / 99) for step in range(100)]
    assert loss_line(run_facts(run(losses), {})).startswith(told)
