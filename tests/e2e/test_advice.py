"""What `rankscope train` says of a run by itself: advice once, when the first steps show it, and why it ended."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.launched import start, train, unhurried

# Longer than the 8 s that a busy watch rests between two looks.
STEPS, STEP_S = 40, 0.3
EVERY_STEP = [
    f"train.steps={STEPS}",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=2",
    "train.eval_interval=1",
    "train.eval_batches=2",
    "data.validation_ratio=0.1",
]


def test_a_run_that_leaves_its_plan_is_told_while_it_trains(tmp_path: Path) -> None:
    """An evaluation in each step gathers the parameters more often than the plan says, which counts training alone."""
    run = train(tmp_path, "two", settings=EVERY_STEP, faults=unhurried(2, steps=STEPS, seconds=STEP_S))
    lines = [line for line in run.output.splitlines() if line.startswith("ADVICE")]
    (line,) = [line for line in lines if "differs from its plan" in line]
    assert re.search(r"all_gather [\d.]+ [KM]iB instead of [\d.]+ [KM]iB \(\+\d+ %\)", line)
    assert "Compare the layout, the batch and the devices with those of `rankscope plan`" in line
    told = [(event["finding_kind"], event["cause"]) for event in run.events("advice")]
    assert len(told) == len(set(told)) == len(lines)
    known = {(found["kind"], found["cause"]) for found in run.analyze()["findings"] if found["status"] == "advice"}
    assert ("configuration", "plan") in known
    (said,) = [event for event in run.events("advice") if event["cause"] == "plan"]
    (ended,) = run.events("run_ended")
    assert said["wall_ns"] < ended["wall_ns"], "it is said when it is known, not when the run is over"


def test_what_a_device_cannot_do_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    run = start(tmp_path, "two", settings=["train.float8=tensorwise", "train.steps=5"]).finish(exit_code=2)
    (line,) = run.output.splitlines()
    assert "train.float8 = 'tensorwise': no fp8 matrix products on CPU" in line
    assert "train.float8_emulated = true to emulate fp8" in line
    assert not list(run.runs_dir.glob("*")), "the launcher refuses before it makes a folder"
