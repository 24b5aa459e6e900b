"""Exposed communication of runs recorded on a GPU against Kineto's traces of the same steps, as `watch` enters them."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.communication.analyze import communication
from analyzers.communication.trace_check import against_traces
from analyzers.finding import Finding
from analyzers.scope import Scope
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Store
from tests.support.recorded_gpu import copy_gpu_run, gpu_recording
from watch.profiling.trace_summary import summarise


def with_captures(name: str, folder: Path, factor: float = 1.0) -> Store:
    """The recording with both ranks' traces summarised; `factor`: multiplies what the traces show as exposed."""
    run = RunDir.open(copy_gpu_run(name, folder))
    for rank in (0, 1):
        about = summarise(gpu_recording(name) / f"trace_rank{rank}.json.gz")
        about["parts_ms"]["exposed"] *= factor
        steps = {"path": f"traces/{rank}", "first_step": 51, "last_step": 56, "reason": "", "request": None}
        events = EventWriter(run.rank_dir(0, rank) / "events.jsonl", attempt=0, rank=rank)
        events.write(event_kinds.PROFILE_CAPTURED, bytes=1, removed=[], **steps)
        events.write(event_kinds.PROFILE_SUMMARY, capture_rank=rank, **steps, **about)
        events.close()
    return Store.open(run)


def exposed(store: Store) -> Finding:
    (found,) = [one for one in communication(store, Scope()) if one.kind == "exposed_communication"]
    return found


@pytest.mark.parametrize("name", ["stamped_none", "stamped_fsdp2_none"])
def test_a_trace_of_the_same_steps_agrees(name: str, tmp_path: Path) -> None:
    with with_captures(name, tmp_path) as store:
        check = against_traces(store, 0)
        assert check is not None
        assert check.captures == 2
        assert check.gap_ratio < 0.07
        assert exposed(store).status in ("ok", "advice")


def test_what_the_trace_contradicts_is_not_judged(tmp_path: Path) -> None:
    with with_captures("stamped_fsdp2_none", tmp_path, factor=3.0) as store:
        found = exposed(store)
    assert found.status == "insufficient_data"
    assert "torch's profiler saw" in found.summary
