"""Metrics that programs write as one JSON object per step: which values are read, and what is a log instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from store.readers.programs.metrics_lines import read, recognise
from store.readers.programs.metrics_table import read as read_table
from tests.analyzers.evidence.written import diagnosed

DETECTRON2 = {"data_time": 0.01, "eta_seconds": 900.5, "iteration": 19, "loss_cls": 0.5, "lr": 0.01, "time": 0.5,
              "total_loss": 2.0}  # fmt: skip
MMENGINE = {"lr": 0.01, "data_time": 0.01, "loss": 2.0, "time": 0.5, "epoch": 2, "iter": 3, "memory": 9, "step": 19}
LLAMA_FACTORY = {"current_steps": 19, "total_steps": 310, "loss": 2.0, "lr": 0.01, "epoch": 0.8, "percentage": 16.13,
                 "elapsed_time": "0:02:37"}  # fmt: skip
VERL = {"step": 19, "data": {"actor/pg_loss": 2.0, "actor/lr": 0.01, "timing_s/step": 0.5}}
RAY = {"loss": 2.0, "lr": 0.01, "training_iteration": 19, "time_this_iter_s": 0.5, "timestamp": 1790000000}
FLAT = {"step": 19, "global_avg_loss": 2.0, "lr": 0.01, "step_time_ms": 500.0, "val_loss": 9.0}


def written(folder: Path, rows: list[Mapping[str, Any]]) -> Path:
    path = folder / "metrics.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("row", [DETECTRON2, MMENGINE, VERL, RAY, FLAT, LLAMA_FACTORY])
def test_values_of_each_writer(tmp_path: Path, row: Mapping[str, Any]) -> None:
    path = written(tmp_path, [row, row])
    assert recognise(path.read_bytes())
    (found,) = read(path).steps
    assert (found["step"], found["loss"], found["lr"]) == (19, 2.0, 0.01)
    assert found["duration_ns"] == (None if row is LLAMA_FACTORY else 500_000_000)


def test_the_last_planned_step_is_reached(tmp_path: Path) -> None:
    rows = [LLAMA_FACTORY | {"current_steps": step, "loss": 3 - step / 200} for step in range(10, 311, 10)]
    assert read(written(tmp_path, list(rows))).steps[-1]["total"] == 310
    assert "total" not in read(written(tmp_path, list(rows[:-1]))).steps[-1]


def test_steps_that_became_slower_are_found_in_detectron2s_metrics(tmp_path: Path) -> None:
    rows = [DETECTRON2 | {"iteration": 20 * n, "total_loss": 3 - n / 100, "time": 0.25 if n < 60 else 0.5,
                          "eta_seconds": 2000.0 - n} for n in range(1, 101)]  # fmt: skip
    (found,) = diagnosed(tmp_path, "metrics.json", written(tmp_path, list(rows)).read_bytes()).fired
    assert "500 ms per step instead of 250" in found.summary


@pytest.mark.parametrize(
    "row",
    [
        {"step": 3, "loss": 2.0, "message": "step done"},
        {"mode": "val", "step": 50, "loss": 2.0},
        {"step": 3, "loss": 2.0, "error": "CUDA out of memory on rank 3"},
        {"step": 3, "accuracy": 0.5},
        {"step": 3, "val_loss": 0.5},
    ],
)
def test_log_lines_and_other_values_are_not_taken(row: Mapping[str, Any]) -> None:
    line = json.dumps(row).encode() + b"\n"
    assert not recognise(line + line)


def test_a_single_object_is_not_a_series_of_steps() -> None:
    assert not recognise(json.dumps(FLAT).encode())


def test_a_text_line_far_below_is_named(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [FLAT | {"step": step} for step in range(2000)]
    path = written(tmp_path, [*rows, {"step": 2000, "error": "ValueError: the tensor is not finite"}])
    assert recognise(path.read_bytes()[: 64 << 10])
    assert read(path).problem == "line 2001 holds text, which was not read: ValueError: the tensor is not finite"


@pytest.mark.parametrize("name", ["step_time_ms", "iter_time (ms)", "step_time_in_ms", "iteration-time-ms"])
def test_milliseconds_in_a_columns_name_are_converted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,loss,{name}\n1,2.0,350\n", encoding="utf-8")
    assert read_table(path).steps[0]["duration_ns"] == 350_000_000


def mmcv(epoch: int, number: int, loss: float, **more: object) -> dict[str, object]:
    return {"mode": "train", "epoch": epoch, "iter": number, "lr": 0.02, "data_time": 0.01, "loss": loss, "time": 0.4,
            **more}  # fmt: skip


def test_iterations_within_an_epoch_are_added_up(tmp_path: Path) -> None:
    begin = {"env_info": "sys.platform: linux\nPython: 3.8.5 (default, Sep  4 2020)", "seed": 0}
    epochs = [mmcv(epoch, number, epoch + number / 1000) for epoch in (1, 2, 3) for number in (50, 100)]
    evaluated = {"mode": "val", "epoch": 1, "iter": 625, "lr": 0.02, "bbox_mAP": 0.4}
    again = [mmcv(3, 50, 9.0)]  # resumed within the epoch
    path = written(tmp_path, [begin, *epochs[:2], evaluated, *epochs[2:], *again])
    assert recognise(path.read_bytes())
    found = read(path)
    assert [row["step"] for row in found.steps] == [50, 100, 150, 200, 250, 300]
    assert [row["loss"] for row in found.steps][2:5] == [2.05, 2.1, 3.05]
    assert found.problem == ""


def test_iterations_that_continue_over_the_epochs_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, [mmcv(1, 50, 3.0), mmcv(1, 100, 2.5), mmcv(2, 150, 2.0)])
    assert [row["step"] for row in read(path).steps] == [50, 100, 150]


def test_rows_of_an_evaluation_are_left_out_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,split,loss\n1,val,9.0\n1,train,2.0\n2,Test,9.0\n", encoding="utf-8")
    assert [(row["step"], row["loss"]) for row in read_table(path).steps] == [(1, 2.0)]


def test_of_several_runs_in_an_export_the_first_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wandb_export.csv"
    header = '"Step","sun-2 - train/loss","sun-2 - train/loss__MIN","sea-1 - train/loss","sea-1 - train/loss__MIN"'
    path.write_text(f"{header}\n1,2.0,2.0,7.0,7.0\n2,1.9,1.9,6.9,6.9\n3,,,6.8,6.8\n", encoding="utf-8")
    found = read_table(path)
    assert [(row["step"], row["loss"]) for row in found.steps] == [(1, 2.0), (2, 1.9)]
    assert found.problem == "holds 2 runs: only the first, sun-2, was read"
