"""Metrics that trackers and trainers wrote, in the shape in which each writes them: the steps read from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.rows import column_of
from store.readers.programs.wandb_history import read as read_history
from tests.analyzers.evidence.written import diagnosed

STEPS, SPIKE, START_S = 80, 60, 1_790_000_000


def loss(step: int) -> float:
    return 9.0 if step == SPIKE else 3.0 - 0.01 * step + 0.002 * (step % 3)


def trainer_state() -> str:
    history: list[dict[str, Any]] = [
        {"epoch": step / 100, "grad_norm": 1.0, "learning_rate": 2e-4, "loss": loss(step), "step": step}
        for step in range(1, STEPS + 1)
    ]
    history.insert(20, {"epoch": 0.2, "eval_loss": 99.0, "eval_runtime": 3.0, "step": 20})
    history.append({"epoch": 1.0, "step": STEPS, "total_flos": 1.0, "train_loss": 2.5, "train_runtime": 812.0})
    return json.dumps({"best_metric": None, "epoch": 1.0, "global_step": STEPS, "log_history": history}, indent=2)


def lightning() -> str:
    """CSVLogger of Lightning: the learning rate in rows of its own."""
    lines = ["epoch,lr-AdamW,step,train_loss,val_loss"]
    for step in range(1, STEPS + 1):
        lines += [f",0.0002,{step},,", f"0,,{step},{loss(step)},"]
    return "\n".join([*lines, f"0,,{STEPS},,1.7"]) + "\n"


def exported_scalar() -> str:
    rows = [f"{START_S + step * 0.5},{step},{loss(step)}" for step in range(1, STEPS + 1)]
    return "\n".join(["Wall time,Step,Value", *rows]) + "\n"


def wandb_history() -> str:
    return "".join(
        json.dumps({"train/loss": loss(step), "train/global_step": step, "_step": step * 2, "_runtime": step * 0.5,
                    "_timestamp": START_S + step * 0.5}) + "\n"
        for step in range(1, STEPS + 1)
    )  # fmt: skip


def mllog() -> str:
    lines = [':::MLLOG {"namespace": "", "time_ms": 1790000000000, "event_type": "INTERVAL_START", "key": "run_start", '
             '"value": null, "metadata": {"file": "train.py", "lineno": 80}}']  # fmt: skip
    for step in range(1, STEPS + 1):
        entry = {"namespace": "", "time_ms": 1790000000000 + 500 * step, "event_type": "POINT_IN_TIME",
                 "key": "train_loss", "value": loss(step), "metadata": {"step_num": step, "lr": 2e-4}}  # fmt: skip
        lines.append(f":::MLLOG {json.dumps(entry)}")
    return "\n".join(lines) + "\n"


def tensorboard() -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = [Event(wall_time=START_S, file_version="brain.Event:2")]
    for step in range(1, STEPS + 1):
        value = Summary.Value(tag="train/loss", simple_value=loss(step))
        events.append(Event(wall_time=START_S + 0.5 * step, step=step, summary=Summary(value=[value])))
    records = [event.SerializeToString() for event in events]
    return b"".join(struct.pack("<Q", len(data)) + b"\0" * 4 + data + b"\0" * 4 for data in records)


def wandb_file() -> bytes:
    from wandb.proto.wandb_internal_pb2 import Record

    blob = b":W&B" + b"\0" * 3
    for step in range(1, STEPS + 1):
        record = Record()
        values = {"train/loss": loss(step), "_step": step, "_timestamp": START_S + 0.5 * step}
        for key, value in values.items():
            record.history.item.add(key=key, value_json=json.dumps(value))
        data = record.SerializeToString()
        left = 32768 - len(blob) % 32768
        if left < 7:
            blob += b"\0" * left
            left = 32768
        if left < 7 + len(data):
            room = left - 7
            blob += struct.pack("<IHB", 0, room, 2) + data[:room]
            blob += struct.pack("<IHB", 0, len(data) - room, 4) + data[room:]
        else:
            blob += struct.pack("<IHB", 0, len(data), 1) + data
    return blob


STEP_FILES: dict[str, Callable[[], str | bytes]] = {
    "trainer_state.json": trainer_state, "metrics.csv": lightning, "run-x_tag-train_loss.csv": exported_scalar,
    "wandb-history.jsonl": wandb_history, "result_0.txt": mllog, "events.out.tfevents.1790000000.host": tensorboard,
    "run-abc.wandb": wandb_file,
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_FILES)
def test_a_loss_spike_is_found_in_what_trackers_and_trainers_wrote(tmp_path: Path, name: str) -> None:
    diagnosis = diagnosed(tmp_path, name, STEP_FILES[name]())
    (spike,) = (finding for finding in diagnosis.findings if finding.kind == "loss_spike")
    assert spike.first_step == SPIKE
    assert diagnosis.run["steps"] == STEPS
    assert diagnosis.run["file_problems"] == []


@pytest.mark.parametrize("name", STEP_FILES)
def test_a_file_that_is_cut_gives_the_steps_before(tmp_path: Path, name: str) -> None:
    made = STEP_FILES[name]()
    blob = made.encode() if isinstance(made, str) else made
    diagnosis = diagnosed(tmp_path, name, blob[: len(blob) // 2])
    assert STEPS // 3 <= diagnosis.run["steps"] <= STEPS // 2 + 1


def test_times_of_rows_are_durations_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "wandb-history.jsonl"
    path.write_text(wandb_history())
    rows = read_history(path).steps
    assert rows[0]["duration_ns"] is None
    assert {row["duration_ns"] for row in rows[1:]} == {500_000_000}


def test_two_runs_in_a_folder_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(lightning())
    (tmp_path / "b.csv").write_text("step,train_loss\n" + "".join(f"{step},{7.0 + step}\n" for step in range(1, 80)))
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.run["steps"] == STEPS
    (problem,) = diagnosis.run["file_problems"]
    assert problem["path"] == "b.csv"
    assert "second run" in problem["problem"]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("loss", "loss"), ("train/loss", "loss"), ("train_loss_step", "loss"), ("Loss/train", "loss"),
        ("loss_metrics/global_avg_loss", "loss"), ("train/grad_norm", "grad_norm"), ("lr-AdamW", "lr"),
        ("train/learning_rate", "lr"), ("perf/step_time", "duration_s"), ("eval_loss", None), ("val/loss", None),
        ("loss/val", None), ("aux_loss", None), ("loss_scale", None), ("test_loss", None), ("accuracy", None),
    ],
)  # fmt: skip
def test_metrics_belong_to_columns_by_name(name: str, column: str | None) -> None:
    assert column_of(name) == column


def test_the_end_of_a_table_of_metrics(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text("step,train_loss\n" + "".join(f"{step},{9 / step:.3f}\n" for step in range(1, 90)))
    found = diagnose_files([table])
    assert found.verdict.endswith("No failure seen. These files do not record how the job ended.")
    assert found.run["ended"] == "not recorded"
    history = [{"step": step, "loss": 9 / step} for step in range(1, 90)]
    for planned, verdict in ((89, "The job reached its last step, 89 of 89"), (300, "89 printed steps to step 89")):
        state = tmp_path / "trainer_state.json"
        state.write_text(json.dumps({"global_step": 89, "log_history": history, "max_steps": planned}))
        assert diagnose_files([state]).verdict.startswith(verdict)


def test_times_between_rows_show_no_rhythm_of_steps(tmp_path: Path) -> None:
    rows = (f"{1_790_000_000 + step + 9 * (step // 20)},{step},{2 + 0.01 * (step % 3):.3f}\n" for step in range(400))
    table = tmp_path / "metrics.csv"
    table.write_text("timestamp,step,train_loss\n" + "".join(rows))
    assert diagnose_files([table]).fired == ()


def ended_with(code: int) -> bytes:
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record()
    record.exit.exit_code = code
    data = record.SerializeToString()
    return wandb_file() + struct.pack("<IHB", 0, len(data), 1) + data


def test_the_exit_code_that_a_tracker_recorded(tmp_path: Path) -> None:
    (tmp_path / "debug.log").write_text(
        "2026-11-26 10:00:00,123 INFO MainThread:7 [wandb_init.py:init():900] starting\n"
    )
    (tmp_path / "debug-internal.log").write_text('{"time":"a","level":"INFO","msg":"stream: start"}\n' * 9)
    (tmp_path / "run-abc.wandb").write_bytes(ended_with(1))
    (lost,) = (one for one in diagnose_files([tmp_path]).fired if one.kind == "rank_lost")
    assert (lost.status, "exit code 1" in lost.summary) == ("suspect", True)
    (tmp_path / "run-abc.wandb").write_bytes(ended_with(0))
    found = diagnose_files([tmp_path])
    assert found.run["ended"] == "finished"
    assert "damaged" not in str(found.run["file_problems"])


@pytest.mark.parametrize("status", ["success", "aborted"])
def test_the_end_of_an_mlperf_run_is_what_it_says(tmp_path: Path, status: str) -> None:
    stop = {"key": "run_stop", "value": None, "time_ms": int(START_S * 1e3) + 10**6, "metadata": {"status": status}}
    path = tmp_path / "result_0.txt"
    path.write_text(mllog() + f":::MLLOG {json.dumps(stop)}\n")
    assert diagnose_files([path]).run["ended"] == "finished"
    path.write_text(mllog())
    assert diagnose_files([path]).run["ended"] == "not recorded"


def test_steps_without_a_loss_are_not_called_free_of_problems(tmp_path: Path) -> None:
    rows = [{"_step": n, "_timestamp": 1.79e9 + n, "lr": 1e-4, "loss_of_mine": 2.1} for n in range(60)]
    path = tmp_path / "wandb-history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = diagnose_files([path]).verdict
    assert "60 printed steps" in verdict
    assert "Only the durations were judged" in verdict
