"""Runs recorded on a GPU with the profiler's traces of the same steps, as `watch` records them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from tests.support.recorded_gpu import copy_gpu_run, gpu_recording
from watch.profiling.trace_reader import summarise

__all__ = ["with_captures"]


def with_captures(name: str, folder: Path, factor: float = 1.0) -> RunDir:
    """The recording with both ranks' traces summarised; `factor` multiplies their exposed time."""
    run = RunDir.open(copy_gpu_run(name, folder))
    for rank in (0, 1):
        summary = copy.deepcopy(_summary(name, rank))
        summary["parts_ms"]["exposed"] *= factor
        steps = {"path": f"traces/{rank}", "first_step": 51, "last_step": 56, "reason": "", "request": None}
        events = EventWriter(run.rank_dir(0, rank) / "events.jsonl", attempt=0, rank=rank)
        events.write(event_kinds.PROFILE_CAPTURED, bytes=1, removed=[], **steps)
        events.write(event_kinds.PROFILE_SUMMARY, capture_rank=rank, **steps, **summary)
        events.close()
    return run


@cache
def _summary(name: str, rank: int) -> dict[str, Any]:
    return dict(summarise(gpu_recording(name) / f"trace_rank{rank}.json.gz"))
