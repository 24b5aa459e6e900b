"""Which of two runs is better: not one that failed, however fast it was."""

from __future__ import annotations

import pytest

from analyzers.compare.answer import answer, shortcoming
from analyzers.compare.loss_change import LossChange
from analyzers.compare.two_runs import arguments
from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding
from analyzers.stragglers.throughput import Change


def speed(ratio: float) -> Change:
    return Change(
        ratio=ratio, low=ratio - 0.05, high=ratio + 0.05, per_token=True, ms_before=100.0, ms_after=100 * ratio
    )


def loss(difference: float, *, is_real: bool) -> LossChange:
    return LossChange(
        common_steps=100, difference=difference, noise=0.0063, first_different_step=2, is_real=is_real,
        equal_tokens=True,
    )  # fmt: skip


def test_a_faster_run_that_failed_is_faster_and_not_better() -> None:
    text = answer("A", "B", speed(0.8), None, against_b="was interrupted after step 60")
    assert text.startswith("B is faster than A, but was interrupted after step 60. B takes")
    text = answer("A", "B", speed(0.8), loss(-0.2, is_real=True), against_b="was interrupted after step 60")
    assert text.startswith("B is faster than A and has the lower loss, but was interrupted")
    assert answer("A", "B", speed(0.8), None, against_a="failed").startswith("B is better than A.")


def test_of_two_equally_fast_runs_the_one_that_finished_is_better() -> None:
    text = answer("A", "B", speed(1.0), None, against_b="ended with an error after step 50")
    assert text.startswith("A is better than B, which ended with an error after step 50.")
    assert answer("A", "B", speed(1.0), None, against_a="x", against_b="y").startswith("Neither B nor A")


def test_a_speed_that_the_load_of_the_hosts_may_explain_makes_no_run_better() -> None:
    load = "The load of the hosts differs (4.00 and 1.00 per CPU), and the speed may differ because of it."
    text = answer("A", "B", speed(0.8), None, load=load)
    assert text.startswith(
        f"Neither B nor A is shown to be better. B takes 20.0 % less time per token (95 % interval 15.0 "
        f"to 25.0 %). {load}"
    )
    assert answer("A", "B", speed(1.2), loss(-0.2, is_real=True), load=load).startswith("B is better than A. B takes")


def test_a_loss_difference_is_judged_against_four_times_its_noise() -> None:
    text = answer("A", "B", speed(1.0), loss(-0.0242, is_real=False))
    assert (
        "0.0242 lower at the end of their 100 common steps, which may be chance (less than 4 times its noise of 0.0063)"
        in text
    )
    assert "within" not in text
    same = answer("A", "B", speed(1.0), loss(0.0, is_real=False))
    assert "The loss is the same at the end, and first differs at step" in same


def diagnosis(ended: str, *findings: Finding) -> Diagnosis:
    return Diagnosis(verdict="", findings=findings, run={"ended": ended, "steps": 50})


def critical(kind: str, severity: str = "critical") -> Finding:
    return Finding(analyzer=kind, kind=kind, severity=severity, status="fired", summary="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "other", "text"),
    [
        (diagnosis("finished"), diagnosis("finished"), ""),
        (diagnosis("failed"), diagnosis("finished"), "ended with an error after step 50"),
        (diagnosis("failed"), diagnosis("interrupted"), ""),
        (diagnosis("finished", critical("hang")), diagnosis("finished"), "has a critical finding (HANG)"),
        (diagnosis("finished", critical("hang")), diagnosis("finished", critical("hang")), ""),
        (diagnosis("finished", critical("straggler", "warning")), diagnosis("finished"), ""),
    ],
)
def test_what_only_one_run_has_counts_against_it(run: Diagnosis, other: Diagnosis, text: str) -> None:
    assert shortcoming(run, other) == text


def test_the_arguments_of_a_script_are_settings() -> None:
    words = ["train.py", "--lr", "3e-3", "--fault=spike", "--bf16", "-n", "-3", "--layers", "1", "2", "--bf16"]
    assert arguments({"attached": True, "command": words}) == {
        "--lr": "3e-3", "--fault": "spike", "--bf16": "set, set", "-n": "-3", "--layers": "1 2",
        "arguments": "train.py",
    }  # fmt: skip
    assert arguments({"command": words}) == {}
    assert arguments({"attached": True}) == {}


def test_a_loss_that_ended_as_nan_is_the_higher_one() -> None:
    text = answer("A", "B", speed(1.0), loss(-0.2, is_real=True), nonfinite_since=(None, 32))
    assert text.startswith("A is better than B. ")
    assert text.endswith(" The loss of B is NaN or Inf from step 32 on.")
    text = answer("A", "B", speed(0.8), None, nonfinite_since=(None, 5))
    assert text.startswith("B is faster, A has the lower loss. ")
    assert "Too few common steps" not in text
    assert answer("A", "B", speed(1.0), None, nonfinite_since=(5, 9)).startswith("Neither B nor A")
