"""Steps of a run that a text log prints, and that another program's file holds as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files

LOSSES = [3.0 / (1 + n / 60) + 1.2 for n in range(1, 101)]


def judged(folder: Path, log: list[str], state: list[dict[str, Any]]) -> Diagnosis:
    (folder / "train.log").write_text("\n".join(log) + "\n")
    about = {"global_step": state[-1]["step"], "log_history": state, "max_steps": 5000}
    (folder / "trainer_state.json").write_text(json.dumps(about))
    return diagnose_files([folder])


def state_of(every: int, losses: list[float]) -> list[dict[str, Any]]:
    return [{"step": every * n, "loss": round(loss, 4), "learning_rate": 1e-5} for n, loss in enumerate(losses, 1)]


def transformers(losses: list[float]) -> list[str]:
    """Lines of the trainer, which have no number of a step."""
    return [f"{{'loss': {loss:.4f}, 'grad_norm': 0.9, 'epoch': {n / 400:.2f}}}" for n, loss in enumerate(losses, 1)]


def numbered(losses: list[float]) -> list[str]:
    return [f"step: {10 * n} loss: {loss:.2f} step_time: 1.00s" for n, loss in enumerate(losses, 1)]


def test_counted_lines_are_not_mixed_with_steps(tmp_path: Path) -> None:
    found = judged(tmp_path, transformers(LOSSES), state_of(10, LOSSES))
    assert found.fired == ()
    assert "100 printed steps to step 1000" in found.verdict


def test_of_a_few_steps_and_many_lines_the_lines_are_kept(tmp_path: Path) -> None:
    found = judged(tmp_path, transformers(LOSSES), state_of(1000, LOSSES[-1:]))
    assert found.fired == ()
    assert "100 printed lines of a step" in found.verdict


def test_a_step_in_both_is_one_step_with_the_values_of_both(tmp_path: Path) -> None:
    found = judged(tmp_path, numbered(LOSSES), state_of(10, LOSSES))
    assert found.fired == ()
    assert found.run["file_problems"] == []
    assert found.verdict.startswith("The log ends in training: 100 printed steps to step 1000")


def test_a_file_of_another_run_beside_a_log_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, numbered(LOSSES), state_of(10, [loss + 4 for loss in LOSSES]))
    assert found.fired == ()
    (problem,) = found.run["file_problems"]
    assert problem["problem"] == "differs from the logs in the loss at step 10: a second run?"


@pytest.mark.parametrize("every", [1, 10])
def test_a_file_that_counts_samples_is_joined_by_step(tmp_path: Path, every: int) -> None:
    """DeepSpeed's monitor writes each step, or as many as the log prints."""
    known = [LOSSES[(step - 1) // 10] for step in range(1, 1001)]
    rows = "".join(f"{512 * step},{known[step - 1]}\n" for step in range(every, 1001, every))
    (tmp_path / "Train_Samples_train_loss.csv").write_text(f"step,train_loss\n{rows}")
    (tmp_path / "train.log").write_text("\n".join(numbered(LOSSES)) + "\n")
    found = diagnose_files([tmp_path])
    assert found.fired == ()
    assert found.run["file_problems"] == []
    assert f"{1000 // every} printed steps to step 1000" in found.verdict.replace(",", "")


def test_a_file_in_the_same_range_without_a_common_step_is_named(tmp_path: Path) -> None:
    state = [{"step": 10 * n + 3, "loss": loss + 3} for n, loss in enumerate(LOSSES, 1)]
    found = judged(tmp_path, numbered(LOSSES), state)
    assert found.fired == ()
    (problem,) = found.run["file_problems"]
    assert problem["problem"].startswith("has no step in common with the logs")


def test_an_earlier_attempt_beside_the_log_of_a_later_one_is_joined(tmp_path: Path) -> None:
    later = [f"step: {1000 + 10 * n} loss: {1.9 - n / 1000:.3f}" for n in range(1, 101)]
    found = judged(tmp_path, later, state_of(10, LOSSES))
    assert found.fired == ()
    assert found.run["logs"]["printed_losses"] == 200


def test_of_few_printed_steps_and_many_others_the_others_are_kept(tmp_path: Path) -> None:
    found = judged(tmp_path, numbered(LOSSES[:3]), state_of(7, LOSSES))
    assert found.fired == ()
    assert found.run["steps"] == 700
    assert found.run["logs"]["printed_losses"] == 100
