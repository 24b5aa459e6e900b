"""Steps of a run that a text log prints, and that another program's file holds as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
