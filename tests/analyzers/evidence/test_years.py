"""Times without a year: beside files that state it, they are of that year, whenever the file was copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files

HANG = (
    "[rank1]:[E{at} ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum=7, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) "
    "ran for 600010 milliseconds before timing out.\n"
)
XID = "[{at}] NVRM: Xid (PCI:0000:1a:00): 79, pid=9, name=python, GPU has fallen off the bus.\n"


def judged(folder: Path, files: dict[str, str]) -> Diagnosis:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return diagnose_files([folder])


def test_a_kernel_log_with_years_is_matched_to_a_job_log_without_one(tmp_path: Path) -> None:
    logs = {"job.log": HANG.format(at="406 07:20:10.100"), "dmesg-n1.txt": XID.format(at="Sat Apr  6 07:10:02 2024")}
    first = judged(tmp_path, logs).fired[0]
    assert (first.cause, first.status) == ("device_error", "fired")


@pytest.mark.parametrize("at", ["Tue Apr  2 07:10:02 2024", "Thu Apr  6 07:10:02 2023"])
def test_a_kernel_line_of_another_day_or_year_is_not_matched(tmp_path: Path, at: str) -> None:
    text = "2024-04-06 07:09:59,100 INFO start\n" + HANG.format(at="406 07:20:10.100")
    found = judged(tmp_path, {"job.log": text, "dmesg-n1.txt": XID.format(at=at)})
    assert all(one.cause != "device_error" for one in found.fired)


def test_a_file_that_states_a_year_on_some_lines_has_it_on_all(tmp_path: Path) -> None:
    text = "2024-04-06 07:09:59,100 INFO start\n" + HANG.format(at="406 07:20:10.100")
    found = judged(tmp_path, {"job.log": text, "dmesg-n1.txt": XID.format(at="Sat Apr  6 07:10:02 2024")})
    assert found.fired[0].cause == "device_error"
