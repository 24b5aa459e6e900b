"""Read `trainer_state.json` of transformers: one entry per logged step, and the run's totals at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.readers.programs.rows import Point, ProgramRows, point_of, step_rows
from store.readers.programs.text import read_chunks
from store.readers.untrusted.external_files import SourceError, rank_of_name
from store.readers.untrusted.json_stream import members

NAME = "trainer_state.json of transformers"


def recognise(first: bytes) -> bool:
    """Return True for an object with the trainer's fields."""
    return first.lstrip()[:1] == b"{" and b'"global_step"' in first and b'"log_history"' in first


def read(path: Path) -> ProgramRows:
    """Read the file up to where it is damaged."""
    points: list[Point] = []
    rows = ProgramRows()
    reached: dict[str, Any] = {}
    try:
        for key, value, is_item in members(read_chunks(path), {"log_history"}):
            if not is_item:
                reached[key] = value
            elif isinstance(value, dict):
                if (point := point_of(value.get("step"), value)) is not None:
                    points.append(point)
                if "train_runtime" in value:
                    text = f"train_runtime {value['train_runtime']} at step {value.get('step')}"
                    rows.log_events.append({"kind": "finished", "line": 0, "message": text[:200], "fields": {}})
    except SourceError as error:
        rows.problem = str(error)
    rank = rank_of_name(path) if "rank" in path.name.lower() else 0
    rows.steps = step_rows(points, rank=rank or 0)
    planned = reached.get("max_steps")
    if rows.steps and isinstance(planned, int) and planned == reached.get("global_step"):
        rows.steps[-1]["total"] = planned
    return rows
