"""A node whose clock is wrong, and a clock that is set during a run: times are still in order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import diagnose
from analyzers.report.wording.file_lines import file_lines
from probes.tape.event_kinds import CLOCK_OFFSET
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.factories import make_run

S = 1_000_000_000
TWO_NODES = {2: {"node_rank": 1, "local_rank": 0}, 3: {"node_rank": 1, "local_rank": 1}}


def put_ahead(folders: Sequence[Path], ahead_s: float, *, from_line: int = 0, tapes: bool = True) -> None:
    """Write what processes would have written if their wall clock had been ahead, from event `from_line` on."""
    for folder in folders:
        for tape in folder.glob("*.tape") if tapes else ():
            blob = tape.read_bytes()
            found = re.search(rb'"wall_ns": ?(\d+)', blob[:4096])
            assert found is not None
            moved = str(int(found[1]) + int(ahead_s * S)).encode()
            tape.write_bytes(blob[: found.start(1)] + moved + blob[found.end(1) :])
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        for event in lines[from_line:]:
            event["wall_ns"] += int(ahead_s * S)
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))


def rank_folders(run: RunDir, ranks: Sequence[int], attempt: int = 0) -> list[Path]:
    return [run.rank_dir(attempt, rank) for rank in ranks]


def begins(run: RunDir, attempt: int = 0) -> list[int]:
    """When the ranks started their first steps, seconds after rank 0."""
    with Store.open(run) as store:
        rows = store.rows(
            "SELECT rank, min(start_ns) FROM steps WHERE attempt = ? GROUP BY rank ORDER BY rank", [attempt]
        )
    return [round((start_ns - rows[0][1]) / 1e9) for _, start_ns in rows]


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -40.0, 3600.0])
def test_times_are_by_the_first_nodes_clock(tmp_path: Path, ahead_s: float) -> None:
    run = make_run(tmp_path, steps=12, identities=TWO_NODES)
    put_ahead(rank_folders(run, [2, 3]), ahead_s)
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
        ((spread_ns,),) = store.rows("SELECT max(wall_ns) - min(wall_ns) FROM events WHERE kind = 'rank_closed'")
        ((offset_ns,),) = store.rows("SELECT max(clock_offset_ns) - min(clock_offset_ns) FROM ranks WHERE rank > 1")
    assert begins(run) == [0, 0, 0, 0]
    assert spread_ns < S
    assert offset_ns < S
    assert diagnosis.goodput is not None
    assert diagnosis.goodput.wall_s < 12
    facts: Mapping[str, Any] = diagnosis.run
    problems = facts["file_problems"]
    if not ahead_s:
        assert problems == []
        return
    how = f"{abs(ahead_s):,.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the first node's"
    assert [(one["path"], how in one["problem"]) for one in problems] == [("telemetry-node1.duckdb", True)]
    assert "Records incomplete" not in diagnosis.verdict
    assert [label for label, _ in file_lines(facts)] == ["Clock"]


def test_each_attempt_has_its_difference(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=8, identities=TWO_NODES, end="failed")
    make_run(tmp_path, steps=8, identities=TWO_NODES, run=run, attempt=1, first_step=9)
    put_ahead(rank_folders(run, [2, 3]), 3600)  # and right again before the second attempt
    assert begins(run, 0) == begins(run, 1) == [0, 0, 0, 0]


def test_without_a_step_the_measured_difference_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, identities=TWO_NODES)
    put_ahead(rank_folders(run, [2, 3]), 3600)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write(CLOCK_OFFSET, node_rank=1, offset_ns=3600 * S, error_ns=1_000_000)
    node.close()
    with Store.open(run) as store:
        ((spread_ns,),) = store.rows("SELECT max(wall_ns) - min(wall_ns) FROM ranks")
    assert spread_ns < 60 * S


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 3.0])
def test_events_after_the_clock_was_set_stay_in_order(tmp_path: Path, ahead_s: float) -> None:
    run = make_run(tmp_path, steps=12, ranks=2)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("watch_started", pid=1)
    node.write("watch_stopped", pid=1)
    node.close()
    put_ahead(rank_folders(run, [0, 1]), ahead_s, from_line=2, tapes=False)
    put_ahead([run.node_dir(0)], ahead_s, from_line=-1, tapes=False)
    with Store.open(run) as store:
        ends = store.rows("SELECT kind, wall_ns FROM events WHERE kind IN ('rank_closed', 'watch_stopped')")
        ((last_step_ns,),) = store.rows("SELECT max(start_ns + duration_ns) FROM steps")
        diagnosis = diagnose(store, run.manifest())
    assert {kind for kind, _ in ends} == {"rank_closed", "watch_stopped"}
    assert all(abs(wall_ns - last_step_ns) < 2 * S for _, wall_ns in ends), ends
    assert diagnosis.goodput is not None
    assert diagnosis.goodput.seconds["shutdown"] < 2


def test_a_start_after_a_reboot_has_its_time(tmp_path: Path) -> None:
    """The monotonic clock begins again, and the machine was off for a day."""
    run = make_run(tmp_path, steps=4, ranks=1)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("watch_started", pid=1)
    node.write("watch_started", pid=2)
    node.write("watch_stopped", pid=2)
    node.close()
    path = run.node_dir(0) / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for event in lines[-2:]:
        event |= {"wall_ns": event["wall_ns"] + 86400 * S, "mono_ns": event["mono_ns"] % S}
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    with Store.open(run) as store:
        ((stopped_ns,),) = store.rows("SELECT wall_ns FROM events WHERE kind = 'watch_stopped'")
    assert stopped_ns == lines[-1]["wall_ns"]
