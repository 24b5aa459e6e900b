"""A GPU that hung on rank 3 of 8, played: logs, dumps, traces and RAS are one verdict; less without one of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from tests.analyzers.evidence.test_logs import state, watchdog
from tests.store.readers.test_ras import ras_answer
from tests.store.readers.trace_files import trace, write
from tests.support.simulator.recorder_dumps import Job

RANKS, HUNG = 8, 3
RAS = """\
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 7
  1 ranks have launched up to operation 6
  Rank 3 -- GPU 3 managed by process 903 on node 10.0.0.4

"""
XID = "Mar  1 08:30:00 gpu-01 kernel: NVRM: Xid (PCI:0000:33:00): 119, pid=903, Timeout waiting for RPC from GSP!\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Rank 3's GPU stops inside all_reduce 6, which the others complete; they wait for it in the next call."""
    others = [rank for rank in range(RANKS) if rank != HUNG]
    dumps = Job(RANKS)
    dumps.steps(5)
    dumps.collective("all_reduce", ranks=others, state="completed")
    dumps.collective("all_reduce", ranks=[HUNG])
    dumps.collective("all_gather", ranks=others)
    dumps.write(tmp_path / "dumps")
    text = "".join(
        f"gpu-01:90{r}:91{r} [{r}] NCCL INFO comm 0x5{r} rank {r} nranks 8 cudaDev {r} busId {30 + r}000 - Init\n"
        for r in range(RANKS)
    )
    text += "".join(watchdog(r, 7, op="_ALLGATHER_BASE") + state(r, 7, 9, 6) for r in others)
    text += watchdog(HUNG, 6) + state(HUNG, 6, 9, 5)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job.log").write_text(text)
    (tmp_path / "logs" / "kern-gpu-01.log").write_text(XID)
    (tmp_path / "ras.txt").write_text(RAS)
    for rank in range(RANKS):
        write(tmp_path / "traces", trace(rank, world_size=RANKS, steps=12), f"rank{rank}")
    return tmp_path


def test_all_files_give_one_verdict(job: Path) -> None:
    diagnosis = diagnose_files([job])
    first = diagnosis.fired[0]
    assert (first.status, first.ranks, first.cause) == ("fired", (HUNG,), "device_error")
    assert first.evidence["xids"] == [119]
    assert "did not complete all_reduce #6" in first.evidence["dumps"]
    assert diagnosis.run["files_read"] == {"text log": 3, "flight-recorder dump": 8, "profiler trace": 8}
    assert all(set(finding.ranks) <= {HUNG} for finding in diagnosis.fired)


@pytest.mark.parametrize(
    ("gone", "status", "cause"),
    [
        (["dumps"], "fired", "device_error"),
        (["traces"], "fired", "device_error"),
        (["ras.txt"], "fired", "device_error"),
        (["logs/kern-gpu-01.log"], "fired", "device_stuck"),
        (["logs"], "fired", "device_stuck"),
        (["logs/kern-gpu-01.log", "dumps"], "suspect", "device_stuck"),
        (["logs", "dumps"], "suspect", "not_entered"),
    ],
)
def test_the_culprit_is_named_whichever_file_is_missing(job: Path, gone: list[str], status: str, cause: str) -> None:
    for name in gone:
        path = job / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    first = diagnose_files([job]).fired[0]
    assert (first.status, first.ranks, first.cause) == (status, (HUNG,), cause)


def test_ras_as_json_says_the_same(job: Path) -> None:
    (job / "ras.txt").unlink()
    counts = {rank: 6 if rank == HUNG else 7 for rank in range(RANKS)}
    (job / "ras.json").write_text(ras_answer({"0x27a0": counts}))
    assert diagnose_files([job]).fired[0].cause == "device_error"
    shutil.rmtree(job / "logs")
    shutil.rmtree(job / "dumps")
    first = diagnose_files([job]).fired[0]
    assert (first.status, first.ranks, first.cause) == ("suspect", (HUNG,), "not_entered")


def test_traces_alone_show_no_hang(job: Path) -> None:
    assert diagnose_files([job / "traces"]).fired == ()
