"""What counts against a node, since when, and how it comes back."""

from __future__ import annotations

import json
from pathlib import Path

from probes.tape.rundir import RunDir
from trainer.launcher.nodes.node_exclusion import (
    count_failures,
    exclude_node,
    exclusion_path,
    exclusion_reason,
    reset_failure_counts,
)


def _run(tmp_path: Path, *events: dict[str, object]) -> RunDir:
    run = RunDir(tmp_path)
    folder = run.node_dir(1)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        for event in events:
            wall_ns = len(events) and file.tell() + 1  # a line that stands there twice is one event
            file.write(json.dumps({"wall_ns": wall_ns, "attempt": 0, "rank": -1, **event}) + "\n")
    return run


def test_blamed_deaths_and_launches_without_an_end_count(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        {"kind": "run_started"},
        {"kind": "rank_exit", "blamed": True},
        {"kind": "rank_exit", "blamed": False},
        {"kind": "run_started"},
        {"kind": "run_ended"},
    )
    assert count_failures(run, 1) == 2, "one rank, and the life that has no end"
    assert count_failures(run, 0) == 0, "another node's are its own"


def test_a_resumed_run_counts_from_zero(tmp_path: Path) -> None:
    run = _run(tmp_path, {"kind": "run_started"}, {"kind": "rank_exit", "blamed": True})
    reset_failure_counts(run, readmit=False)
    assert count_failures(run, 1) == 0
    _run(tmp_path, {"kind": "rank_exit", "blamed": True, "wall_ns": 2**62})
    assert count_failures(run, 1) == 1


def test_an_excluded_node_stays_excluded_until_it_is_readmitted(tmp_path: Path) -> None:
    run = _run(tmp_path)
    reset_failure_counts(run, readmit=False)
    exclude_node(run, 1, "3 failures")
    reset_failure_counts(run, readmit=False)
    assert (exclusion_reason(run, 1), exclusion_reason(run, 0)) == ("3 failures", "")
    reset_failure_counts(run, readmit=True)
    assert exclusion_reason(run, 1) == ""


def test_a_damaged_file_excludes_no_node(tmp_path: Path) -> None:
    run = _run(tmp_path)
    reset_failure_counts(run, readmit=False)
    exclusion_path(run, 1).write_text("{")
    assert exclusion_reason(run, 1) == ""
