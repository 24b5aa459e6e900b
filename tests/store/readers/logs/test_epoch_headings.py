"""Epochs printed as a line of their own or as a row before a bar: their losses and bars are read as steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.logs.scan import read_log
from store.readers.logs.step_lines import epoch_heading_of
from store.readers.logs.step_rows import step_rows

LOOP = "{heading}\n{rule}\ntrain Loss: {loss} Acc: 0.71\nval Loss: {loss} Acc: 0.69\n\n"
SEGMENTATION = (
    "2026-03-01 10:{minute:02d}:00.100000: {heading}\n2026-03-01 10:{minute:02d}:00.200000: Current lr: 0.01\n"
    "2026-03-01 10:{minute:02d}:50.100000: train_loss {loss}\n2026-03-01 10:{minute:02d}:51.100000: val_loss -0.1\n"
    "2026-03-01 10:{minute:02d}:52.100000: Epoch time: 51.9 s\n"
)
ROW = (
    "\n      Epoch    GPU_mem   box_loss   cls_loss  Instances       Size\n"
    "     {epoch:>3}/12      4.35G   {parts}         {labels}        640: 100%|####| 30/30 [00:15<00:00,  2.00it/s]\n"
    "                 Class     Images  Instances      mAP50: 100%|####| 4/4 [00:03<00:00,  1.13it/s]\n"
)


def rows_of(folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "train.log").write_text(text)
    return step_rows(0, read_log(folder / "train.log").steps)


@pytest.mark.parametrize(
    ("heading", "epoch"),
    [
        ("Epoch 7/24", 7), ("epoch:  7", 7), (": Epoch 7", 7), ("==== EPOCH 7 ====", 7), ("Epoch [7/24]", 7),
        ("Epoch 7 of 24:", 7), ("Epoch 7: loss 0.3", None), ("Epoch time: 7 s", None), ("epochs: 7", None),
    ],
)  # fmt: skip
def test_a_line_that_states_only_an_epoch_is_a_heading(heading: str, epoch: int | None) -> None:
    assert epoch_heading_of(heading) == epoch


def test_the_losses_below_an_epochs_heading_are_its_steps(tmp_path: Path) -> None:
    text = "".join(LOOP.format(heading=f"Epoch {n}/9", rule="-" * 10, loss=2 - n / 10) for n in range(6))
    assert [row["loss"] for row in rows_of(tmp_path, text)] == [2 - n / 10 for n in range(6)]


def test_times_of_lines_give_the_durations_of_epochs(tmp_path: Path) -> None:
    text = "".join(SEGMENTATION.format(minute=n, heading=f"Epoch {n}", loss=-0.1 * n) for n in range(5))
    rows = rows_of(tmp_path, text)
    assert [row["loss"] for row in rows] == pytest.approx([-0.1 * n for n in range(5)])
    assert {row["duration_ns"] for row in rows[1:]} == {60 * 10**9}


@pytest.mark.parametrize("form", ["Epoch {n}/9", "Epoch: {n}"])
def test_a_loss_that_becomes_nan_below_a_heading_is_found(tmp_path: Path, form: str) -> None:
    losses = [2.0, 1.9, 1.8, "nan", "nan", "nan"]
    text = "".join(LOOP.format(heading=form.format(n=n), rule="-", loss=loss) for n, loss in enumerate(losses))
    (tmp_path / "train.log").write_text(text)
    (found,) = diagnose_files([tmp_path / "train.log"]).fired
    assert (found.kind, found.evidence["first_step_of_loss"]) == ("non_finite", 4)


def test_a_bar_that_only_ends_is_printed_counts_on_over_epochs(tmp_path: Path) -> None:
    text = "".join(ROW.format(epoch=n, parts=f"{2 - n / 9:.4f} {9 - n / 3:7.2f}", labels=10**n) for n in range(1, 5))
    assert [row["step"] for row in rows_of(tmp_path, text)] == [30, 60, 90, 120]


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_part_of_the_loss_before_a_bar_that_is_not_finite_is_found(tmp_path: Path, bad: str) -> None:
    parts = ["1.9       4.21", "1.8       4.11", f"{bad}        {bad}", f"{bad}        4.11", f"{bad}      {bad}"]
    text = "".join(ROW.format(epoch=n, parts=each, labels=28) for n, each in enumerate(parts, 1))
    (found,) = diagnose_files([_written(tmp_path, text)]).fired
    assert (found.kind, found.evidence["first_step_of_loss"]) == ("non_finite", 90)
    healthy = text.replace(bad, "1.7")
    assert not diagnose_files([_written(tmp_path, healthy)]).fired
    assert not any(math.isnan(row.get("loss") or 0) for row in rows_of(tmp_path, healthy))


def _written(folder: Path, text: str) -> Path:
    (folder / "train.log").write_text(text)
    return folder / "train.log"
