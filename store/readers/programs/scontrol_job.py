"""Output of Slurm's `scontrol show job`: how the last job that is listed ended."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import HEADER_LINES, end_of_job
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "scontrol show job"
_FIELD = re.compile(r"(?:^|\s)(JobId|JobState|Reason|ExitCode|EndTime|NodeList)=(\S*)")


def recognise(first: bytes) -> bool:
    """Return True for the first line of a job."""
    lines = first.lstrip().splitlines()[:HEADER_LINES]  # a shell's prompt may stand before it
    return any(line.lstrip().startswith(b"JobId=") for line in lines) and b"JobState=" in first


def read(path: Path) -> ProgramRows:
    """Read the last job."""
    jobs: list[tuple[int, dict[str, str]]] = []
    for number, line in enumerate(read_text(path, DOCUMENT_BYTES).splitlines(), 1):
        for name, value in _FIELD.findall(line):
            if name == "JobId":
                jobs.append((number, {}))
            if jobs:
                jobs[-1][1].setdefault(name, value)
    found = ProgramRows()
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {jobs[-1][1]['JobId']}, was read"
    if jobs:
        number, job = jobs[-1]
        row = {"State": job.get("JobState", ""), "ExitCode": job.get("ExitCode", ""), "End": job.get("EndTime", ""),
               "NodeList": job.get("NodeList", ""), "JobID": job["JobId"]}  # fmt: skip
        event = end_of_job(row, number)
        found.log_events += [event] if event else []
    return found
