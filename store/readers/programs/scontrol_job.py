"""Read Slurm's `scontrol show job`: how the last job in the list ended."""

from __future__ import annotations

from pathlib import Path

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import end_of_job, with_state
from store.readers.programs.scontrol import blocks, is_listing
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "scontrol show job"


def recognise(first: bytes) -> bool:
    """Return True for a listing of jobs."""
    return is_listing(first, "JobId", "JobState")


def read(path: Path) -> ProgramRows:
    """Read the last job."""
    jobs = blocks(read_text(path, DOCUMENT_BYTES), "JobId")
    found = ProgramRows()
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {jobs[-1][1]['JobId']}, was read"
    if jobs:
        number, job = jobs[-1]
        row = {"State": job.get("JobState", ""), "ExitCode": job.get("ExitCode", ""), "End": job.get("EndTime", ""),
               "NodeList": job.get("NodeList", ""), "JobID": job["JobId"]}  # fmt: skip
        event = end_of_job(row, number)
        found.log_events += [event] if event else []
        found.problem = with_state(found.problem, row)
    return found
