"""Attempts whose lines lie in several files: submitit's two streams a task, torchrun's folder an attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files

FINISHED = "submitit INFO (2026-03-03 12:00:00,001) - Exiting after successful completion\n"
TRACEBACK = """submitit ERROR (2026-03-03 11:00:00,926) - Submitted job triggered an exception
Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/submitit/core/submission.py", line 55, in process_job
    result = delayed.result()
  File "{file}", line 91, in __call__
    batch = next(batches)
FileNotFoundError: [Errno 2] No such file or directory: '/data/shard_0042.bin'
"""


def started(day: int) -> str:
    return f"submitit INFO (2026-03-0{day} 10:00:00,302) - Starting with JobEnvironment(job_id=88, global_rank=0(2))\n"


def steps(first: int, last: int) -> str:
    return "".join(f"step {step} loss {5 - step * 0.03:.3f} time 0.100s\n" for step in range(first, last))


def requeued(folder: Path, *, end: str = "", error: str = "") -> Diagnosis:
    """Two attempts of two tasks that Slurm ended, and a third."""
    for rank in (0, 1):
        ended = (
            "slurmstepd: error: *** STEP 88.0 ON gpu-01 CANCELLED AT 2026-03-01T12:00:00 DUE TO PREEMPTION ***\n"
            "submitit WARNING (2026-03-01 11:59:30,002) - Caught signal SIGUSR2 on gpu-01: this job is preempted.\n"
            "slurmstepd: error: *** STEP 88.0 ON gpu-02 CANCELLED AT 2026-03-02T20:00:02 DUE TO JOB REQUEUE ***\n"
        )
        text = started(1) + steps(0, 40) + started(2) + steps(38, 80) + started(3) + steps(78, 120)
        (folder / f"88_{rank}_log.out").write_text(text + end)
        (folder / f"88_{rank}_log.err").write_text(ended + (error if rank else ""))
    return diagnose_files([folder])


def test_a_requeued_job_of_submitit_that_finished_is_well(tmp_path: Path) -> None:
    found = requeued(tmp_path, end=FINISHED)
    assert found.fired == ()
    assert found.verdict.startswith("The job finished (88_0_log.out:")
    assert found.run["ended"] == "finished, after 2 earlier attempts: preempted (gpu-01), preempted (gpu-02)"


@pytest.mark.parametrize("file", ["/home/u/proj/train.py", "<dynamic-code>"])
def test_the_last_attempt_of_a_requeued_job_is_the_verdict(tmp_path: Path, file: str) -> None:
    (finding,) = requeued(tmp_path, error=TRACEBACK.format(file=file)).fired
    assert (finding.cause, finding.ranks) == ("exception", (1,))
    assert f"{file.removeprefix('/home/u/')}:91 in __call__" in finding.summary


def test_the_only_task_of_submitit_may_have_started_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "88_0_log.err").write_text(TRACEBACK.format(file="/home/u/proj/train.py"))
    (finding,) = diagnose_files([tmp_path]).fired
    assert finding.ranks == ()


def test_torchrun_folders_are_separate_attempts(tmp_path: Path) -> None:
    for attempt in (0, 1):
        for rank in (0, 1):
            folder = tmp_path / "job" / "logs" / "none_x1" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text(steps(0, 20))
            if rank:
                raised = (
                    f'Traceback (most recent call last):\n  File "/job/t.py", line 7, in f\n{"KeyError"}: {attempt}\n'
                )
                (folder / "stderr.log").write_text(raised)
    found = diagnose_files([tmp_path])
    (finding,) = found.fired
    assert (finding.ranks, finding.summary[:26]) == ((1,), "Rank 1 raised KeyError: 1 ")
    assert str(found.run["ended"]).endswith("after an earlier attempt: KeyError")


def test_folders_that_lie_too_deep_are_named(tmp_path: Path) -> None:
    (deep := tmp_path.joinpath(*"abcdefg")).mkdir(parents=True)
    (deep / "rank_0.log").write_text(TRACEBACK)
    (tmp_path / "rank_1.log").write_text(steps(0, 20))
    problems: Any = diagnose_files([tmp_path]).run["file_problems"]
    assert [one["path"] for one in problems] == ["g"]


def test_programs_that_failed_before_in_the_same_file_are_named(tmp_path: Path) -> None:
    failed = 'Traceback (most recent call last):\n  File "/w/train.py", line {line}, in <module>\n    main()\n{error}\n'
    (tmp_path / "run.log").write_text(
        steps(0, 60) + failed.format(line=40, error="torch.OutOfMemoryError: CUDA out of memory.")
        + steps(0, 90) + failed.format(line=35, error="OSError: [Errno 28] No space left on device: '/ckpt/a.pt'")
    )  # fmt: skip
    found = diagnose_files([tmp_path])
    assert [one.cause for one in found.fired] == ["disk_full"]
    assert "another program in the same file failed earlier: OutOfMemoryError at run.log:61" in str(found.run["ended"])


def test_of_many_jobs_in_one_file_the_last_is_judged(tmp_path: Path) -> None:
    """Also where only an earlier one printed the lines of a start."""
    start = (
        "[2026-08-21 01:59:37,351] torch.distributed.run: [WARNING] Setting OMP_NUM_THREADS environment variable for "
        "each process to be 1 in default\n"
    )
    text = "".join(
        (start if job == 12 else "") + steps(0, 30)
        + f"slurmstepd: error: *** JOB {job} ON gpu-01 CANCELLED AT 2026-08-21T0{job - 9}:26:53 ***\n"
        for job in (11, 12, 13)
    )  # fmt: skip
    (tmp_path / "slurm.out").write_text(text)
    found = diagnose_files([tmp_path / "slurm.out"])
    assert str(found.run["ended"]).startswith("cancelled by Slurm at 2026-08-21T04:26:53")
