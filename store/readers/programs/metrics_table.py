"""Read CSV tables of metrics by step: `metrics.csv` of Lightning's CSVLogger, exports of TensorBoard and W&B.

A row may hold a single metric, so rows of the same step are joined.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from store.readers.programs.rows import MAX_ROWS, Point, ProgramRows, column_of, points_of, step_rows
from store.readers.programs.text import read_chunks
from store.readers.untrusted.external_files import SourceError, rank_of_name

NAME = "table of metrics (metrics.csv)"
_STEPS = ("step", "_step", "global_step", "trainer/global_step", "iteration", "iter")
_TIMES = ("wall time", "_timestamp", "timestamp")
MAX_HEADER_CHARS = 20_000


def recognise(first: bytes) -> bool:
    """Return True for a header with a step and a known metric, or of TensorBoard's export of one scalar."""
    names = _names(first.split(b"\n", 1)[0].decode("utf-8-sig", "replace").rstrip("\r"))
    step = next((name for name in names if name.lower() in _STEPS), None)
    if step is None:
        return False
    return any(column_of(_metric(name)) for name in names if name != step) or _is_scalar(names)


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
    step = next(name for name in names if name.strip().lower() in _STEPS)
    time = next((name for name in names if name.strip().lower() in _TIMES), None)
    tag = path.name.split("tag-")[-1].split(".")[0].replace("_", "/") if _is_scalar(names) else ""
    points: list[Point] = []
    try:
        for row in reader:
            wall_ns = _wall_ns(row.get(time)) if time else None
            metrics = {tag: row.get("Value")} if tag else {_metric(name): row[name] for name in names if name != step}
            point = points_of(row.get(step), {name: value for name, value in metrics.items() if value}, wall_ns)
            if point is not None:
                points.append(point)
            if len(points) >= MAX_ROWS:
                problem = problem or f"has more than {MAX_ROWS:,} rows: the rest was not read"
                break
    except csv.Error as error:
        problem = problem or f"is not CSV from line {reader.line_num} on: {error}"
    rank = rank_of_name(path) if "rank" in path.name.lower() else 0
    return ProgramRows(steps=step_rows(points, rank=rank or 0), problem=problem)


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


def _is_scalar(names: list[str]) -> bool:
    return [name.lower() for name in names] == ["wall time", "step", "value"]


def _wall_ns(text: str | None) -> int | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return int(seconds * 1e9) if 1e9 < seconds < 1e10 else None
