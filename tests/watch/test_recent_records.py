"""The newest records in memory: what an earlier attempt left behind costs nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK
from store.ingest.newest_folders import NewestFolders
from tests.factories import make_run
from watch.recent_records import RecentRecords


def test_events_of_earlier_attempts_are_left_out_unless_they_concern_later_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=3)
    make_run(tmp_path, run=run, attempt=1, ranks=2, steps=3)
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    for attempt in (0, 1, 2):  # of attempt 2 the launcher has spoken, and no rank has a folder
        with contextlib.closing(EventWriter(run.node_dir(0) / "events.jsonl", attempt=attempt, rank=NODE_RANK)) as node:
            for kind in ("excluded", "stacks", "rank_stopped"):
                node.write(kind)
    with RecentRecords(run, NewestFolders(run, 0), anchor_ns=None) as recent:
        rows = recent.read().rows(
            "SELECT kind, list(attempt ORDER BY attempt) FROM events WHERE rank < 0 GROUP BY kind"
        )
    kept = dict(rows)
    assert (kept["excluded"], kept["stacks"], kept["rank_stopped"]) == ([0, 1, 2], [1, 2], [1, 2])
