"""Versions, shapes and gaps of flight-recorder dumps."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from tests.analyzers.evidence.test_dump_verdicts import hang_of, skipped
from tests.support.simulator.recorder_dumps import Job


@pytest.mark.parametrize("version", ["2.0", "2.4", "2.10", "2"])
def test_versions_of_the_format(tmp_path: Path, version: str) -> None:
    """Fields that a version lacks are missing, and the verdict is the same."""
    job = Job(4, version=version)
    job.steps(5)
    skipped(job)
    if version == "2.0":
        for entries in job.entries:
            for entry in entries:
                for name in ("is_p2p", "timeout_ms", "thread_id", "thread_name", "input_dtypes", "output_dtypes"):
                    del entry[name]
    hang = hang_of(job.write(tmp_path))
    assert (hang.cause, hang.ranks) == ("not_entered", (3,))


def test_a_later_major_version_is_refused_in_one_line(tmp_path: Path) -> None:
    diagnosis = diagnose_files([Job(2, version="3.0").write(tmp_path)])
    assert "version 3.0: only 2.x is supported" in diagnosis.run["file_problems"][0]["problem"]
    assert diagnosis.fired == ()


def test_a_dump_older_than_the_versioned_format_is_named(tmp_path: Path) -> None:
    entry = {"record_id": 0, "pg_id": 0, "seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "completed"}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps([entry], protocol=2))
    diagnosis = diagnose_files([tmp_path])
    assert "of torch 2.2 or older: only format 2.x" in diagnosis.run["file_problems"][0]["problem"]


def test_an_empty_ring_is_reported(tmp_path: Path) -> None:
    assert "TORCH_FR_BUFFER_SIZE" in diagnose_files([Job(2).write(tmp_path)]).findings[0].summary


def test_of_two_dumps_of_a_rank_the_later_is_read(tmp_path: Path) -> None:
    job = Job(2)
    job.steps(2)
    job.write(tmp_path / "old", after_s=0)
    job.collective("all_reduce", ranks=[0])
    job.write(tmp_path / "new")
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.fired[0].ranks == (1,)
    assert sum("second dump" in found["problem"] for found in diagnosis.run["file_problems"]) == 2


def test_512_ranks(tmp_path: Path) -> None:
    job = Job(512)
    job.steps(4)
    job.collective("all_reduce", ranks=[rank for rank in range(512) if rank != 300])
    assert hang_of(job.write(tmp_path)).ranks == (300,)


def test_dumps_pickled_again_by_python_are_read(tmp_path: Path) -> None:
    job = Job(2)
    job.collective("all_reduce", ranks=[0])
    for rank in range(2):
        for protocol in (2, 3, 4, 5):
            folder = tmp_path / str(protocol)
            folder.mkdir(exist_ok=True)
            (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(job.dump(rank), protocol=protocol))
    verdicts = {diagnose_files([tmp_path / str(protocol)]).verdict for protocol in (2, 3, 4, 5)}
    assert len(verdicts) == 1
    assert "Rank 1 did not reach" in verdicts.pop()
