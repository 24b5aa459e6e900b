"""The state of a run whose `watch` ingests more seldom than its ranks record."""

from __future__ import annotations

import time
from pathlib import Path

from analyzers.run.live.folder_state import folder_state
from analyzers.run.live.state import RunState
from analyzers.run.policy import StallPolicy
from probes.tape.rundir import RunDir
from store import Ingester, Store
from store.published.copy_time import stored_until_ns
from tests.factories import make_run

SECOND = 1_000_000_000


def _state(run: RunDir) -> RunState:
    with Store.open(run, catch_up=False) as store:
        return folder_state(run, store, StallPolicy(), now_ns=time.time_ns())


def test_ranks_are_silent_only_as_far_as_watch_has_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=200, step_ms=200, hang={1: 200})  # its newest record is some 20 s old
    with Ingester(run, role="watch") as watch:
        while watch.tick().lag:
            pass
        last_ns = _state(run).last_ns
        assert last_ns is not None
        watch.mark_ingested(last_ns + SECOND)
        read_on = _state(run)
        watch.mark_ingested(last_ns + 10 * SECOND)
        silent = _state(run)
    assert (read_on.word, read_on.as_of_ns) == ("training", last_ns + SECOND)
    assert read_on.reason.startswith("watch last read the records ")
    assert silent.word == "stalled"
    assert silent.reason.startswith("no record for 10 s, the limit is 5 s")


def test_without_a_watch_the_present_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=3, end="")
    with Ingester(run, role="watch") as watch:
        watch.tick()
        watch.mark_ingested(SECOND)
        assert stored_until_ns(run) == SECOND
    assert stored_until_ns(run) > SECOND
