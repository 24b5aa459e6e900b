"""Verdicts on a part of a job's dumps, on several culprits at once, and on dumps whose records have no times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.evidence.joining import join
from analyzers.finding import Finding
from tests.support.simulator.recorder_dumps import Job

GROUPS = {
    "1": ("TENSOR", [4, 5]),
    "2": ("TENSOR", [6, 7]),
    "3": ("EXPERT", [4, 5, 6, 7]),
    "4": ("PIPELINE", [0, 4]),
    "5": ("PIPELINE", [1, 5]),
    "6": ("PIPELINE", [2, 6]),
    "7": ("PIPELINE", [3, 7]),
}
"""Two stages of a pipeline of four ranks each, the second with tensor and expert groups."""
SECOND_HALF = [4, 5, 6, 7]


def two_devices_stop() -> Job:
    """The devices of ranks 4 and 6 stop in a call that 5 and 7 completed; the first stage waits for messages."""
    job = Job(8, groups=GROUPS)
    job.steps(5)
    job.collective("all_gather", group="1", ranks=[5], state="completed")
    job.collective("all_gather", group="1", ranks=[4])
    job.collective("all_gather", group="2", ranks=[7], state="completed")
    job.collective("all_gather", group="2", ranks=[6])
    job.collective("all_to_all", group="3", ranks=[5, 7])
    job.collective("all_reduce", ranks=[5, 7])
    for group in ("4", "5", "6", "7"):
        job.p2p(1, 0, group=group, sides="recv", state="started")
    return job


@pytest.mark.parametrize("ranks", [None, SECOND_HALF])
def test_two_stuck_devices_are_named_in_all_dumps_and_in_half_of_them(tmp_path: Path, ranks: list[int] | None) -> None:
    (hang,) = diagnose_files([two_devices_stop().write(tmp_path, ranks=ranks)]).fired
    assert (hang.kind, hang.cause, hang.ranks) == ("hang", "device_stuck", (4, 6))
    assert hang.evidence["completed_ranks"] == [5, 7]
    assert not {4, 6} & set(hang.evidence["waiting_ranks"])


def test_ranks_without_a_dump_are_not_named_where_a_dumped_one_stayed_away(tmp_path: Path) -> None:
    job = Job(8, groups=GROUPS)
    job.steps(5)
    job.collective("all_to_all", group="3", ranks=[4, 6, 7])
    job.collective("all_reduce", ranks=[4, 6, 7])
    (hang,) = diagnose_files([job.write(tmp_path, ranks=SECOND_HALF)]).fired
    assert (hang.cause, hang.ranks) == ("not_entered", (5,))
    assert hang.summary.startswith("Rank 5 did not reach")
    assert not any(f"rank {rank}" in hang.summary.lower() for rank in range(4))


def test_a_call_of_a_complete_group_stands_before_later_ones_that_lack_dumps(tmp_path: Path) -> None:
    job = Job(8, groups=GROUPS)
    job.steps(5)
    job.collective("all_to_all", group="3")
    job.collective("all_reduce", ranks=SECOND_HALF)
    hang, *_ = diagnose_files([job.write(tmp_path, ranks=SECOND_HALF)]).findings
    assert (hang.kind, hang.status, hang.cause) == ("hang", "suspect", "all_entered")
    assert hang.ranks == (4, 5, 6, 7)
    assert hang.evidence["op"] == "all_to_all"


@pytest.mark.parametrize("created_ns", [None, 0, 5 * 10**12])
def test_records_without_times_of_a_wall_clock_claim_no_duration(tmp_path: Path, created_ns: int | None) -> None:
    """Nothing, zero, and nanoseconds since the host was started."""
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 2])
    for entries in job.entries:
        for entry in entries:
            entry["time_created_ns"] = created_ns
            entry["time_discovered_started_ns"] = entry["time_discovered_started_ns"] and created_ns
            entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] and created_ns
            entry["timeout_ms"] = 0
    diagnosis = diagnose_files([job.write(tmp_path)])
    (hang,) = (finding for finding in diagnosis.findings if finding.kind == "hang")
    assert (hang.status, hang.cause, hang.ranks) == ("suspect", "not_entered", (3,))
    assert "duration is unknown" in hang.summary
    assert hang.evidence["silent_s"] is None
    assert hang.cost_s is None
    assert "e+" not in hang.summary


def found(cause: str, *ranks: int, kind: str = "rank_lost", status: str = "fired") -> Finding:
    return Finding(
        analyzer="logs", kind=kind, severity="critical", status=status,  # type: ignore[arg-type]
        ranks=ranks, cause=cause, summary=f"{cause}.", evidence={"lines": ["dmesg.txt:1: text"]}, advice="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "shown", "expected"),
    [
        (found("device_error"), "not_entered", [("not_entered", "suspect"), ("device_error", "suspect")]),
        (found("link_down"), "device_stuck", [("device_stuck", "suspect"), ("link_down", "suspect")]),
        (found("device_error"), "device_stuck", [("device_stuck", "suspect")]),
        (found("out_of_memory", 3), "not_entered", [("out_of_memory", "fired")]),
        (found("node_failed"), "no_dump", [("node_failed", "fired")]),
    ],
)
def test_a_rank_named_by_dumps_stands_before_a_line_without_one(
    said: Finding, shown: str, expected: list[tuple[str, str]]
) -> None:
    joined = join({"log": [said], "flight_recorder": [found(shown, 3, kind="hang", status="suspect")]})
    assert [(one.cause, one.status) for one in joined] == expected


def counted(folder: Path, *ranks: tuple[int, int, int], elsewhere: int = 0) -> Diagnosis:
    """Dumps of a ring that keeps nothing: (enqueued, started, completed) calls of each rank's default group."""
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    for rank, numbers in enumerate(ranks):
        status = {"0": dict(zip(names, numbers, strict=True)), "1": dict.fromkeys(names, 7)}
        status["1"][names[0]] += elsewhere
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(ranks))))}}
        dump = {"version": "2.4", "pg_config": config, "pg_status": status, "entries": []}
        (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump))
    return diagnose_files([folder])


def test_a_ring_without_calls_is_judged_by_the_numbers_of_the_default_group(tmp_path: Path) -> None:
    away = counted(tmp_path, (12, 12, 11), (11, 11, 11), (12, 12, 11)).findings[0]
    assert (away.cause, away.ranks, away.status) == ("not_entered", (1,), "suspect")
    assert "#12" in away.summary
    assert away.summary.endswith(" The dumps hold no calls, only the call numbers of the default group.")
    stuck = counted(tmp_path, (900, 12, 11), (13, 12, 11), (14, 12, 11)).findings[0]
    assert (stuck.cause, stuck.evidence["seq"], stuck.status) == ("all_entered", 12, "suspect")


def test_numbers_of_calls_alone_clear_no_job_and_blame_no_rank_for_another_group(tmp_path: Path) -> None:
    equal = counted(tmp_path, (12, 12, 12), (12, 12, 12))
    assert equal.verdict.startswith("Nothing was found")
    assert "only their numbers" in equal.not_judged[0].summary
    several = counted(tmp_path, (12, 12, 11), (11, 11, 11), elsewhere=1)
    assert several.verdict.startswith("Nothing was judged")
