"""torchcomms' recorder, in the shape that `hooks/fr/FlightRecorder.cpp` writes: one counter over all communicators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.dumps.flight_recorder import read_dump
from store.readers.untrusted.external_files import SourceError
from tests.support.simulator.recorder_dumps import MS, START_NS

GROUPS = {"main": [0, 1, 2, 3], "tp_a": [0, 1], "tp_b": [2, 3]}


def entry(number: int, group: str, op: str, *, over: bool) -> dict[str, Any]:
    made_ns = START_NS + number * MS
    return {
        "record_id": number, "pg_id": 0, "process_group": [group, "ncclx"], "thread_name": "python", "thread_id": "1",
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": f"ncclx:{op}",
        "time_created_ns": made_ns, "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]],
        "output_dtypes": ["Float"], "state": "started", "time_discovered_started_ns": made_ns,
        "time_discovered_completed_ns": 0, "retired": over, "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip


def dump(rank: int, calls: list[tuple[str, str, bool]], first: int = 0) -> dict[str, Any]:
    return {
        "comm_lib_version": "2.27.3",
        "entries": [entry(first + n, group, op, over=over) for n, (group, op, over) in enumerate(calls)],
        "pg_config": {
            name: {"name": name, "desc": "ncclx", "ranks": str(ranks).replace(" ", "")}
            for name, ranks in GROUPS.items() if rank in ranks
        },
        "pg_status": {}, "version": "2.10",
    }  # fmt: skip


def written(folder: Path, rank: int, calls: list[tuple[str, str, bool]], first: int = 0) -> Path:
    path = folder / f"comm_lib_trace_rank_{rank}"
    path.write_text(json.dumps(dump(rank, calls, first)))
    dumped_s = START_NS / 1e9 + 600
    os.utime(path, (dumped_s, dumped_s))
    return path


def test_groups_are_counted_on_their_own(tmp_path: Path) -> None:
    """Ranks 0 and 1 make more calls in their group than 2 and 3: the numbers of the world still fit."""
    for rank in range(4):
        tp = "tp_a" if rank < 2 else "tp_b"
        calls = [(tp, "all_reduce", True)] * (5 if rank < 2 else 2) + [("main", "all_reduce", True)] * 3
        calls += [("main", "send", True)] * (rank == 0) + [("main", "all_gather_single", False)] * (rank != 3)
        written(tmp_path, rank, calls)
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.status, first.ranks, first.cause) == ("fired", (3,), "not_entered")
    assert (first.evidence["op"], first.evidence["seq"]) == ("all_gather", 3)


def test_a_call_that_is_over_is_done(tmp_path: Path) -> None:
    """Its end was seen by the work's callback and not by an event: `state` stays "started"."""
    found = read_dump(written(tmp_path, 0, [("main", "all_reduce", True)]), 0)
    assert [call.done for calls in found.calls.values() for call in calls.values()] == [True]


def test_lost_records_of_several_groups_cannot_be_numbered(tmp_path: Path) -> None:
    calls = [("main", "all_reduce", True), ("tp_a", "all_reduce", True)]
    with pytest.raises(SourceError, match="cannot be numbered"):
        read_dump(written(tmp_path, 0, calls, first=40), 0)


def test_lost_records_of_one_group_keep_their_numbers(tmp_path: Path) -> None:
    found = read_dump(written(tmp_path, 0, [("main", "all_reduce", True)] * 3, first=40), 0)
    assert list(found.last_seq.values()) == [42]
