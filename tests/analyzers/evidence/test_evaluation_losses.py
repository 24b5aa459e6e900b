"""A loss that is not finite only in evaluations is reported, from lines, tables and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

LINES = (
    "Epoch 3: train loss: 0.41 val_loss: nan",
    "{'eval_loss': nan, 'eval_runtime': 3.1, 'epoch': 1.0}",
    "step 200: train loss 2.1, val loss nan",
    "[epoch 3] Validation Loss: nan",
    '{"epoch": 3, "validation_loss": NaN}',
    "25/25 - 2s 98ms/step - loss: 0.5 - val_loss: inf",
)
ROWS = [(n, 2 - n / 20, "nan" if n > 5 else "0.9") for n in range(12)]


@pytest.mark.parametrize("line", LINES)
def test_an_evaluation_loss_that_is_not_finite_is_reported_from_a_line(tmp_path: Path, line: str) -> None:
    steps = "".join(f"step {n} loss {3 - n / 100:.3f}\n" for n in range(60))
    (found,) = diagnosed(tmp_path, "train.log", f"{steps}{line}\n").fired
    assert (found.kind, found.severity, found.ranks) == ("non_finite", "warning", ())
    assert found.summary.startswith("The evaluation loss (")
    assert "train.log:61" in found.summary
    assert "labels" in next_step(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.csv", "step,train_loss,val_loss\n" + "".join(f"{n},{loss},{val}\n" for n, loss, val in ROWS)),
        ("results.csv", "epoch,accuracy,loss,val_loss\n" + "".join(f"{n},0.5,{loss},{val}\n" for n, loss, val in ROWS)),
        ("metrics.jsonl", "".join(json.dumps({"step": n, "loss": loss, "val_loss": float(val)}) + "\n"
                                  for n, loss, val in ROWS)),
    ],
)  # fmt: skip
def test_an_evaluation_loss_that_is_not_finite_is_reported_from_a_file_of_metrics(
    tmp_path: Path, name: str, text: str
) -> None:
    (found,) = diagnosed(tmp_path, name, text).fired
    assert (found.kind, found.severity, found.first_step) == ("non_finite", "warning", 6)
    assert "val_loss" in found.summary
    assert "6 times" in found.summary
    assert not diagnosed(tmp_path, name, text.replace("nan", "0.8").replace("NaN", "0.8")).fired


def test_a_nonfinite_training_loss_is_reported_without_the_evaluation_loss(tmp_path: Path) -> None:
    lines = [f"step {n} loss {2 if n < 9 else 'nan'}\n" for n in range(30)] + ["val_loss: nan\n"]
    (found,) = diagnosed(tmp_path, "train.log", "".join(lines)).fired
    assert found.summary.startswith("The loss is not finite from step 9 on")


def test_other_words_are_not_taken_for_an_evaluation_loss(tmp_path: Path) -> None:
    steps = "".join(f"step {n} loss {3 - n / 100:.3f}\n" for n in range(60))
    for line in ("val_loss: 0.4", "best val_loss: None", "retrieval_loss: nan", "step 61 loss 2.3 aux_loss: nan"):
        found = diagnosed(tmp_path, "train.log", f"{steps}{line}\n").fired
        assert not [one for one in found if "evaluation" in one.summary], line
