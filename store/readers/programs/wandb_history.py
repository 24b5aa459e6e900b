"""Read the history of a W&B run as JSON lines: `wandb-history.jsonl`, or the rows of `run.scan_history()`."""

from __future__ import annotations

import json
from pathlib import Path

from store.readers.programs.json_lines import objects
from store.readers.programs.rows import Point, ProgramRows, point_of, step_rows
from store.readers.programs.text import read_chunks
from store.readers.untrusted.external_files import SourceError

NAME = "history of W&B"


def recognise(first: bytes) -> bool:
    """Return True for a line with the keys that W&B adds to every row."""
    line = first.split(b"\n", 1)[0]
    if not line.startswith(b"{") or b'"_step"' not in line:
        return False
    try:
        return isinstance(json.loads(line), dict) and (b'"_timestamp"' in line or b'"_runtime"' in line)
    except ValueError:
        return False


def read(path: Path) -> ProgramRows:
    """Read the rows up to where the file is damaged."""
    points: list[Point] = []
    problem = ""
    try:
        for _, row in objects(read_chunks(path)):
            if (point := history_point(row)) is not None:
                points.append(point)
    except SourceError as error:
        problem = str(error)
    return ProgramRows(steps=step_rows(points, rank=0), problem=problem)


def history_point(row: dict[str, object]) -> Point | None:
    """Convert one row. A step that the program logged takes precedence over W&B's count of calls."""
    logged_step = next(
        (row[name] for name in ("train/global_step", "trainer/global_step", "global_step") if name in row), None
    )
    time = row.get("_timestamp")
    wall_ns = int(time * 1e9) if isinstance(time, (int, float)) and 1e9 < time < 1e10 else None
    return point_of(logged_step if logged_step is not None else row.get("_step"), row, wall_ns)
