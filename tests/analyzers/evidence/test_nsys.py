"""Reports of Nsight Systems as sqlite: the same breakdown as of a profiler trace."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files

STEPS = 12


def report(folder: Path, name: str, *, steps: bool = True) -> Path:
    """50 ms of compute, 30 of communication that hide a copy, another copy of 5, 15 ms idle, in a step of 100 ms."""
    path = folder / name
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE StringIds (id INTEGER, value TEXT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER);"
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER);"
            "INSERT INTO StringIds VALUES (1, 'ampere_gemm'), (2, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL');"
        )
        for step in range(STEPS):
            at = 10**9 + 10**8 * step
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 1)", (at, at + 50_000_000))
            for begin, end in ((at + 50_000_000, at + 60_000_000), (at + 85_000_000, at + 90_000_000)):
                connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?)", (begin, end))
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 2)", (at + 50_000_000, at + 80_000_000)
            )
            if steps:
                connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, NULL)", (at, at + 10**8, f"step {step}"))
    connection.close()
    return path


def test_a_report_is_broken_down_by_its_steps(tmp_path: Path) -> None:
    report(tmp_path, "report.sqlite")
    diagnosis = diagnose_files([tmp_path])
    (row,) = diagnosis.run["trace"]["ranks"]
    assert row["steps"] == STEPS
    found = [row[f"{part}_ms"] for part in ("step", "compute", "communication", "exposed", "copies", "idle")]
    assert found == pytest.approx([100.0, 50.0, 30.0, 30.0, 5.0, 15.0])


def test_without_steps_the_report_is_one(tmp_path: Path) -> None:
    report(tmp_path, "rank2.sqlite", steps=False)
    (row,) = diagnose_files([tmp_path]).run["trace"]["ranks"]
    assert (row["rank"], row["steps"]) == (2, 1)


def test_another_sqlite_file_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "rank0.sqlite") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    (tmp_path / "rank1.sqlite").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    diagnosis = diagnose_files([tmp_path])
    problems = " ".join(problem["problem"] for problem in diagnosis.run["file_problems"])
    assert "without kernels" in problems
    assert "cannot be read" in problems
