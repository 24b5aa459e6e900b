"""Read Slurm's `squeue`: how the last job in the list ended, or that it could not start."""

from __future__ import annotations

from pathlib import Path

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import end_of_job, with_state
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "squeue of Slurm"
_STATES = {"BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "DL": "DEADLINE", "NF": "NODE_FAIL",
           "OOM": "OUT_OF_MEMORY", "PR": "PREEMPTED", "TO": "TIMEOUT", "R": "RUNNING",
           "PD": "PENDING", "CG": "COMPLETING", "CF": "CONFIGURING"}  # fmt: skip
_NODES = "NODELIST(REASON)"


def recognise(first: bytes) -> bool:
    """Return True for squeue's header, in the first line or below a shell prompt."""
    return any(_is_header(line) for line in first.decode("utf-8", "replace").splitlines()[:2])


def read(path: Path) -> ProgramRows:
    """Read the last row of the last listing (`watch`, `-i`)."""
    lines = read_text(path, DOCUMENT_BYTES).splitlines()
    top = max(number for number, line in enumerate(lines) if _is_header(line))
    names = lines[top].split()
    rows = [
        (number, dict(zip(names, line.split(None, len(names) - 1), strict=True)))
        for number, line in enumerate(lines[top + 1 :], top + 2)
        if len(line.split()) >= len(names)
    ]
    found = ProgramRows()
    if len(rows) > 1:
        found.problem = f"lists {len(rows)} jobs: only the last, {rows[-1][1]['JOBID']}, was read"
    for number, row in rows[-1:]:
        state, nodes = row.get("ST") or row["STATE"], row[_NODES].strip()
        if "launch failed" in nodes.replace("_", " "):
            message = f"job {row['JOBID']}: {nodes.strip('()')}"
            found.log_events.append({"kind": "launch_failed", "line": number, "message": message, "fields": {}})
        job = {"State": _STATES.get(state, state), "NodeList": nodes, "JobID": row["JOBID"]}
        event = end_of_job(job, number)
        found.log_events += [event] if event else []
        if not found.log_events:
            found.problem = with_state(found.problem, job)
    return found


def _is_header(line: str) -> bool:
    names = line.split()
    return "JOBID" in names and names[-1:] == [_NODES] and not {"ST", "STATE"}.isdisjoint(names)
