"""MLPerf's log (`:::MLLOG {...}` lines): losses and times by step or sample, and how the run ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.readers.external_files import SourceError, unpacked
from store.readers.programs.json_lines import objects
from store.readers.programs.rows import Point, ProgramRows, points_of, step_rows

NAME = "MLPerf log (:::MLLOG)"
_MARK = b":::MLLOG"
_STEPS = ("step_num", "step", "iteration", "samples_count", "samples_num")


def recognise(first: bytes) -> bool:
    """Return True where most lines are MLPerf's: those within a longer log are read with that."""
    lines = [line for line in first.splitlines()[:200] if line.strip()]
    return bool(lines) and 2 * sum(_MARK in line for line in lines) > len(lines)


def read(path: Path) -> ProgramRows:
    """Read the lines up to where the file is damaged."""
    points: list[Point] = []
    rows = ProgramRows()
    try:
        for number, entry in objects(unpacked(path), prefix=_MARK):
            about = entry.get("metadata")
            about = about if isinstance(about, dict) else {}
            if (point := _point(entry, about)) is not None:
                points.append(point)
            if entry.get("key") == "run_stop" and about.get("status") == "success":
                rows.log_events.append(
                    {"kind": "finished", "line": number, "message": "run_stop: success", "fields": {}}
                )
    except SourceError as error:
        rows.problem = str(error)
    rows.steps = step_rows(points, rank=0)
    return rows


def _point(entry: dict[str, Any], about: dict[str, Any]) -> Point | None:
    step = next((about[name] for name in _STEPS if about.get(name) is not None), None)
    time_ms = entry.get("time_ms")
    wall_ns = int(time_ms * 1e6) if isinstance(time_ms, (int, float)) and 1e12 < time_ms < 1e13 else None
    value = entry.get("value")
    metrics = value if isinstance(value, dict) else {str(entry.get("key", "")): value}
    return points_of(step, {**metrics, **{name: about[name] for name in ("lr",) if name in about}}, wall_ns)
