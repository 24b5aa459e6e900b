"""Read metrics of MLflow's file store: one file per metric (`mlruns/*/*/metrics/loss`), with time, value and step on
each line.
"""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.programs.rows import MAX_ROWS, Point, ProgramRows, point_of, step_rows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "metric of MLflow (mlruns)"
_LINE = re.compile(r"\d{13} [-+.\w]{1,40} \d{1,12}\s*$")


def recognise(first: bytes) -> bool:
    """Return True if each complete line is a time in milliseconds, a value and a step."""
    lines = first.decode("utf-8", "replace").splitlines()
    return bool(lines) and all(map(_LINE.match, lines[:-1] or lines))


def read(path: Path) -> ProgramRows:
    """Read the metric. Its name is the file's path below `metrics`, and may contain slashes."""
    folder = max((place for place, part in enumerate(path.parts[:-1], 1) if part == "metrics"), default=-1)
    name = "/".join(path.parts[folder:])
    points: list[Point] = []
    for line in read_text(path, SERIES_BYTES).splitlines()[:MAX_ROWS]:
        if _LINE.match(line):
            time, value, step = line.split()
            point = point_of(step, {name: value}, int(time) * 10**6)
            points += [point] if point is not None else []
    return ProgramRows(steps=step_rows(points, rank=0))
