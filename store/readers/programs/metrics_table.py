"""Read CSV tables of metrics by step: `metrics.csv` of Lightning's CSVLogger, exports of TensorBoard and W&B.

A row may hold a single metric, so rows of the same step are joined. If a table has epochs and no steps (Keras'
CSVLogger, `results.csv` of Ultralytics), an epoch counts as a step. If an epoch has several rows, each row counts as a
step.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from store.readers.programs.rows import (
    MAX_ROWS,
    Point,
    ProgramRows,
    add_evaluation,
    column_of,
    is_of_evaluation,
    point_of,
    step_rows,
)
from store.readers.programs.text import is_number, read_chunks
from store.readers.untrusted.external_files import SourceError, rank_of_name

NAME = "table of metrics (metrics.csv)"
_STEPS = ("step", "_step", "global_step", "trainer/global_step", "iteration", "iter")
_EPOCH = "epoch"
_PART = re.compile(r"train/\w+_loss")
"""Component of a loss, in a table without the total loss (Ultralytics)."""
_TIMES = ("wall time", "_timestamp", "timestamp")
MAX_HEADER_CHARS = 20_000


def recognise(first: bytes) -> bool:
    """Return True for a header with a step and a known metric or loss component, or TensorBoard's for one scalar."""
    names = _names(first.split(b"\n", 1)[0].decode("utf-8-sig", "replace").rstrip("\r"))
    step = _step_column(names)
    if step is None:
        return False
    found = {column_of(_metric(name)) for name in names if name != step} - {None}
    return bool(found - {"lr"} if step.lower() == _EPOCH else found) or _is_scalar(names) or bool(_parts(names))


def read(path: Path) -> ProgramRows:
    """Read the table up to where it is damaged."""
    text, problem = bytearray(), ""
    try:
        for chunk in read_chunks(path, 256 << 20):
            text += chunk
    except SourceError as error:
        problem = str(error)
    whole = text.decode("utf-8-sig", "replace")
    reader = csv.DictReader(io.StringIO(whole), delimiter=_separator(whole.partition("\n")[0]))
    names = list(reader.fieldnames or ())
    step = _step_column(names) or names[0]
    parts = _parts(names)
    runs = _runs(names)
    if len(runs) > 1:
        problem = problem or f"holds {len(runs)} runs: only the first, {runs[0][:60]}, was read"
    columns = [name for name in names if name != step and _run(name) in ("", *runs[:1])]
    time = next((name for name in names if name.strip().lower() in _TIMES), None)
    tag = path.name.split("tag-")[-1].split(".")[0].replace("_", "/") if _is_scalar(names) else ""
    points: list[Point] = []
    events: list[dict[str, Any]] = []
    epochs: list[str] = []
    try:
        for row in reader:
            wall_ns = _wall_ns(row.get(time)) if time else None
            if is_of_evaluation(row):
                continue
            metrics = {tag: row.get("Value")} if tag else {_metric(name): row[name] for name in columns}
            metrics = {name: value.strip() for name, value in metrics.items() if value and value.strip()}
            if parts and all(part in metrics for part in parts):
                metrics["loss"] = str(sum(float(metrics[part]) for part in parts if is_number(metrics[part])))
            add_evaluation(events, reader.line_num, row.get(step), metrics)
            counted = str(len(points) + 1) if step.strip().lower() == _EPOCH else row.get(step)
            point = point_of(counted, metrics, wall_ns)
            if point is not None:
                epochs.append(str(row.get(step)))
                points.append(point)
            if len(points) >= MAX_ROWS:
                problem = problem or f"has more than {MAX_ROWS:,} rows: the rest was not read"
                break
    except csv.Error as error:
        problem = problem or f"is not CSV from line {reader.line_num} on: {error}"
    rank = rank_of_name(path) if "rank" in path.name.lower() else 0
    if step.strip().lower() == _EPOCH and _is_increasing(epochs):
        points = [replace(point, step=int(float(epoch))) for point, epoch in zip(points, epochs, strict=True)]
    return ProgramRows(steps=step_rows(points, rank=rank or 0), log_events=events, problem=problem)


def _step_column(names: Sequence[str]) -> str | None:
    """Name of the column with the steps. Without such a column, the name of the column with the epochs."""
    plain = {name.strip().lower(): name for name in reversed(names)}
    found = next((name for name in names if name.strip().lower() in _STEPS), None)
    return found or plain.get(_EPOCH)


def _parts(names: Sequence[str]) -> list[str]:
    """Columns with loss components, if the table lacks the total loss."""
    if any(column_of(_metric(name)) == "loss" for name in names):
        return []
    return [name for name in names if _PART.fullmatch(name.strip())]


def _is_increasing(epochs: Sequence[str]) -> bool:
    """Return True if each epoch is a whole number greater than the one before."""
    numbers = [float(epoch) if is_number(epoch) else -1.0 for epoch in epochs]
    return all(number >= 0 and number.is_integer() for number in numbers) and all(
        before < after for before, after in pairwise(numbers)
    )


def _names(header: str) -> list[str]:
    separator = _separator(header)
    if separator not in header or len(header) > MAX_HEADER_CHARS or not header.replace("\t", "").isprintable():
        return []
    return [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]


def _separator(header: str) -> str:
    return "," if "," in header else "\t"


def _metric(name: str) -> str:
    """Name of a metric without the run's name, which W&B's exports put before it."""
    run, separator, metric = name.rpartition(" - ")
    return metric if separator and run else name


def _run(name: str) -> str:
    return name.rpartition(" - ")[0].strip()


def _runs(names: Sequence[str]) -> list[str]:
    """Names of the runs for which the table has a known metric."""
    return list(dict.fromkeys(run for name in names if (run := _run(name)) and column_of(_metric(name))))


def _is_scalar(names: list[str]) -> bool:
    return [name.lower() for name in names] == ["wall time", "step", "value"]


def _wall_ns(text: str | None) -> int | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return int(seconds * 1e9) if 1e9 < seconds < 1e10 else None
