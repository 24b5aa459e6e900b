"""Read MLPerf logs (`:::MLLOG {...}` lines): losses and times by step or sample, and how the run ended."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from store.readers.programs.json_lines import objects
from store.readers.programs.rows import MAX_STEP, Point, ProgramRows, column_of, point_of, step_rows
from store.readers.programs.text import read_chunks
from store.readers.untrusted.external_files import SourceError

NAME = "MLPerf log (:::MLLOG)"
_MARK = b":::MLLOG"
_STEPS = ("step_num", "step", "iteration")
_SAMPLES = ("samples_count", "samples_num")
_Entry = tuple[int | None, int | None, dict[str, Any], int | None]
"""Step, number of samples, metrics, time."""


def recognise(first: bytes) -> bool:
    """Return True if most lines are MLPerf's. MLPerf lines within another log are read with that log."""
    lines = [line for line in first.splitlines()[:200] if line.strip()]
    return bool(lines) and 2 * sum(_MARK in line for line in lines) > len(lines)


def read(path: Path) -> ProgramRows:
    """Read the lines up to where the file is damaged."""
    entries: list[_Entry] = []
    batch: int | None = None
    rows = ProgramRows()
    try:
        for number, entry in objects(read_chunks(path), prefix=_MARK):
            metadata = entry.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            if entry.get("key") == "global_batch_size" and isinstance(entry.get("value"), int):
                batch = entry["value"]
            entries.append(_entry(entry, metadata))
            if entry.get("key") == "run_stop":  # aborted: the target was not reached
                text = f"run_stop: {str(metadata.get('status', 'no status'))[:40]}"
                rows.log_events.append({"kind": "finished", "line": number, "message": text, "fields": {}})
    except SourceError as error:
        rows.problem = str(error)
    rows.steps = step_rows(_points(entries, batch), rank=0)
    return rows


def _entry(entry: dict[str, Any], metadata: dict[str, Any]) -> _Entry:
    time_ms = entry.get("time_ms")
    wall_ns = int(time_ms * 1e6) if isinstance(time_ms, (int, float)) and 1e12 < time_ms < 1e13 else None
    value = entry.get("value")
    metrics = value if isinstance(value, dict) else {str(entry.get("key", "")): value}
    metrics = {**metrics, **{name: metadata[name] for name in ("lr",) if name in metadata}}
    return _whole(metadata, _STEPS), _whole(metadata, _SAMPLES), metrics, wall_ns


def _whole(metadata: dict[str, Any], names: tuple[str, ...]) -> int | None:
    value = next((metadata[name] for name in names if metadata.get(name) is not None), None)
    return int(value) if isinstance(value, (int, float)) and 0 <= value < MAX_STEP else None


def _points(entries: list[_Entry], batch: int | None) -> list[Point]:
    """Points by step. Numbers of samples are divided by the batch size, or by the smallest difference between lines."""
    if not batch or batch < 0:
        losses = sorted({samples for step, samples, metrics, _ in entries
                         if step is None and samples is not None and "loss" in map(column_of, metrics)})  # fmt: skip
        batch = min((after - before for before, after in pairwise(losses)), default=1)
    points = (point_of(samples // batch if step is None and samples is not None else step, metrics, wall_ns)
              for step, samples, metrics, wall_ns in entries)  # fmt: skip
    return [point for point in points if point is not None]
