"""A step that the recorder takes back after the store has seen it: no row is left, and no record counts as lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.format.reader import read_segment
from probes.tape.format.writer import TAKEN_BACK
from probes.tape_recorder import TapeRecorder
from store import Ingester, Store
from tests.factories import empty_run


@pytest.mark.parametrize("again", [False, True], ids=["same reader", "new reader"])
def test_a_step_taken_back_after_a_tick_leaves_no_row_and_no_problem(tmp_path: Path, again: bool) -> None:
    """An evaluation after the last step may open one, and last longer than a tick of `watch`."""
    run = empty_run(tmp_path)
    recorder = TapeRecorder(run.rank_dir(0, 0), rank=0, attempt=0, world_size=1, local_rank=0, node_rank=0)
    for number in range(1, 6):
        recorder.begin_step(number)
        recorder.end_step()
    recorder.begin_step(6)
    with Ingester(run) as ingester:
        ingester.tick()
        recorder.discard_step()
        recorder.close()
        if not again:
            ingester.tick(thorough=True)
    if again:
        with Ingester(run) as ingester:
            ingester.tick(thorough=True)
    with Store.open(run) as store:
        assert store.rows("SELECT max(step), count(*) FROM steps") == [(5, 5)]
        assert store.rows("SELECT path, problem FROM ingest_problems") == []
    segment = read_segment(run.rank_dir(0, 0) / "steps.00000.tape")
    assert (segment.taken_back.tolist(), segment.pending.tolist(), segment.damaged) == ([5], [], 0)
    assert TAKEN_BACK not in segment.records["state"]
