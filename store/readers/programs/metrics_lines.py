"""Read metrics by step as JSON lines: detectron2's `metrics.json`, LLaMA-Factory's `trainer_log.jsonl`, MMEngine's
`scalars.json` and MMCV's `.log.json`, verl's file logger, `result.json` of Ray, and other programs' `metrics.jsonl`.

MMCV counts iterations within an epoch, so the last printed count of each epoch is added to the counts of the next.
Objects with a text message are log lines, to which the rules for text logs apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from store.readers.programs.json_lines import objects
from store.readers.programs.rows import Point, ProgramRows, add_evaluation, is_of_evaluation, point_of, step_rows
from store.readers.programs.text import read_chunks
from store.readers.untrusted.external_files import SourceError, rank_of_name

NAME = "metrics by step as JSON lines"
_STEPS = (
    "train/global_step", "trainer/global_step", "global_step", "step", "current_steps", "iteration",
    "training_iteration", "_step",
)  # fmt: skip
_WITHIN_EPOCH = "iter"
_TOTALS = ("total_steps", "max_steps")
_TIMES = ("timestamp", "time", "ts", "wall_time", "_timestamp")
_MESSAGES = ("message", "msg", "log", "text", "MESSAGE", "level", "levelname", "severity")
MIN_SPACES = 3
MIN_LINES = 2
"""Minimum number of lines, because a single object is a document, such as a summary."""


def recognise(first: bytes) -> bool:
    """Return True if all complete lines are objects without a message, and several have a step and a known metric."""
    if not first.lstrip().startswith(b"{"):
        return False
    lines = [line for line in first.split(b"\n") if line.strip()]
    if not first.endswith(b"\n"):
        lines = lines[:-1] if len(lines) > MIN_LINES else lines
    found = 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if isinstance(row, dict) and "env_info" in row:
            continue  # skip the first line of MMCV, because it describes the environment
        if not isinstance(row, dict) or not row.keys().isdisjoint(_MESSAGES) or _sentence(row):
            return False
        found += _point(row) is not None
    return found >= MIN_LINES


def read(path: Path) -> ProgramRows:
    """Read the rows up to where the file is damaged."""
    points: list[Point] = []
    events: list[dict[str, Any]] = []
    problem = ""
    total: int | None = None
    starts: dict[object, int] = {}  # epoch -> number of steps before it; a resumed run may write an epoch again
    before, last = 0, 0
    try:
        for number, row in objects(read_chunks(path)):
            if "env_info" not in row and (text := _sentence(row)):
                problem = problem or f"line {number} holds text, which was not read: {text[:80]}"
            add_evaluation(events, number, _stated_step(row), row)
            if (point := _point(row)) is not None:
                if _is_within_epoch(row):
                    # A smaller number begins the next epoch, which continues from the last step of the previous one.
                    before = starts.setdefault(row["epoch"], before + last * (point.step <= last))
                    last = point.step
                    point.step += before
                points.append(point)
                planned = next((row[name] for name in _TOTALS if isinstance(row.get(name), int)), None)
                total = planned if planned == point.step else None
    except SourceError as error:
        problem = problem or str(error)
    rank = rank_of_name(path) if "rank" in path.name.lower() else 0
    rows = step_rows(points, rank=rank or 0)
    if rows and total is not None and total == rows[-1]["step"]:
        rows[-1]["total"] = total
    return ProgramRows(steps=rows, log_events=events, problem=problem)


def _point(row: Mapping[str, Any]) -> Point | None:
    if is_of_evaluation(row):
        return None
    step = _stated_step(row)
    inner = row.get("data")
    metrics = {**(inner if isinstance(inner, dict) else {}), **row}
    if "data_time" in row and "iter_time" not in row:  # detectron2 and MMEngine: `time` is the step's duration
        metrics["iter_time"] = row.get("time")
    return point_of(step, metrics, _wall_ns(row))


def _stated_step(row: Mapping[str, Any]) -> int | float | None:
    return next((row[name] for name in (*_STEPS, _WITHIN_EPOCH) if isinstance(row.get(name), int | float)), None)


def _is_within_epoch(row: Mapping[str, Any]) -> bool:
    return _WITHIN_EPOCH in row and isinstance(row.get("epoch"), int) and row.keys().isdisjoint(_STEPS)


def _sentence(row: Mapping[str, Any]) -> str:
    """The first value that is a text of several words, such as an error; "" if there is none."""
    return next((value for value in row.values() if isinstance(value, str) and value.count(" ") >= MIN_SPACES), "")


def _wall_ns(row: Mapping[str, Any]) -> int | None:
    for name in _TIMES:
        value = row.get(name)
        if isinstance(value, int | float) and 1e9 < value < 1e10:
            return int(value * 1e9)
    return None
