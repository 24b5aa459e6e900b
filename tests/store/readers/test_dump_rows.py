"""Rows that flight-recorder dumps become: those of the tables of a run, with NULL for what a dump does not tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.readers.dumps.dump_rows import DumpRows, rows_of_dumps
from store.readers.dumps.flight_recorder import read_dump
from store.readers.untrusted.external_files import rank_of_name
from tests.support.simulator.recorder_dumps import Job


def rows(job: Job, folder: Path) -> DumpRows:
    paths = sorted(job.write(folder).iterdir())
    return rows_of_dumps([read_dump(path, rank_of_name(path) or 0) for path in paths])


def test_an_open_call_has_no_end_and_the_state_of_its_kernel(tmp_path: Path) -> None:
    job = Job(2)
    job.steps(2)
    job.collective("all_gather", ranks=[0])
    job.collective("all_gather", ranks=[1], state="scheduled")
    tables = rows(job, tmp_path).tables
    newest = {row["rank"]: row for row in tables["collectives"] if row["seq"] == 3}
    assert {rank: (row["op"], row["end_ns"]) for rank, row in newest.items()} == {
        0: ("all_gather", None),
        1: ("all_gather", None),
    }
    assert newest[0]["process_group"] == "world:0-1"
    assert all(row["end_ns"] >= row["issue_ns"] for row in tables["collectives"] if row["seq"] < 3)
    started = {row["rank"]: row["kernel_start_ns"] is not None for row in tables["nccl_calls"]}
    assert started == {0: True, 1: False}


def test_a_dump_without_times_of_kernels_says_nothing_of_devices(tmp_path: Path) -> None:
    job = Job(2)
    job.collective("all_reduce", state="scheduled")
    tables = rows(job, tmp_path).tables
    assert {row["device"] for row in tables["ranks"]} == {"cuda"}
    assert "nccl_calls" not in tables
    assert "nccl_groups" not in tables


def test_a_call_of_gloo_that_a_member_never_entered_has_not_ended(tmp_path: Path) -> None:
    """gloo records a call as over when it failed."""
    job = Job(3, backend="gloo")
    job.steps(2)
    job.collective("all_reduce", ranks=[0, 2], state="completed")
    ends = {row["rank"]: row["end_ns"] for row in rows(job, tmp_path).tables["collectives"] if row["seq"] == 3}
    assert ends == {0: None, 2: None}


def test_calls_that_a_short_ring_lost_are_no_rows(tmp_path: Path) -> None:
    """How far a rank came in a group is assumed, and said apart from what is recorded."""
    job = Job(3, groups={"1": ("undefined", [0, 1]), "2": ("undefined", [0, 1])}, ring=4)
    job.steps(5)
    job.collective("all_reduce", group="1", ranks=[1])
    dumped = rows(job, tmp_path)
    (group,) = {group for group, _ in dumped.assumed}
    assert dumped.assumed == {(group, 0): 1}
    assert not [row for row in dumped.tables["collectives"] if (row["process_group"], row["rank"]) == (group, 0)]


@pytest.mark.parametrize("before", [10, 100, 300])
@pytest.mark.parametrize("after", [10, 80, 150])
def test_a_group_that_was_created_again_counts_from_its_start(tmp_path: Path, before: int, after: int) -> None:
    job = Job(2)
    job.steps(before)
    job.seq.clear()
    job.steps(after)
    job.collective("all_reduce", ranks=[1])
    dumped = rows(job, tmp_path)
    newest = {row["rank"]: row for row in dumped.tables["collectives"]}
    assert {rank: row["seq"] for rank, row in newest.items()} == {0: after, 1: after + 1}
    assert newest[0]["bytes"] == newest[1]["bytes"] == 4096
    assert newest[1]["end_ns"] is None
    assert not dumped.assumed


def test_of_a_large_job_only_calls_that_ranks_may_wait_in_are_kept(tmp_path: Path) -> None:
    job = Job(8)
    job.steps(60)
    job.collective("all_reduce", ranks=range(7))
    of_rank = {rank: [row["seq"] for row in rows(job, tmp_path).tables["collectives"] if row["rank"] == rank]
               for rank in (0, 3, 7)}  # fmt: skip
    assert len(of_rank[0]) == 61  # the order of a group's calls is read from its first member
    assert of_rank[3][-1] == 61
    assert of_rank[7][-1] == 60
    assert max(len(of_rank[3]), len(of_rank[7])) < 10
