"""Read Slurm's jobs in JSON (`sacct --json`, `scontrol show job --json`, `squeue --json`): how a job and its steps
ended.

The shape differs by version: a number is `9`, or `{"set": true, "number": 9}`; a state is text, or a list of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import end_of_job, with_state
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES, SourceError

NAME = "jobs of Slurm as JSON"


def recognise(first: bytes) -> bool:
    """Return True for an object with jobs and their states."""
    return first.lstrip()[:1] == b"{" and b'"jobs"' in first and b'"exit_code"' in first and b'"job_id"' in first


def read(path: Path) -> ProgramRows:
    """Read the last job in the list. Raises SourceError if the text is not JSON."""
    text = read_text(path, DOCUMENT_BYTES)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError("is cut off or not JSON") from error
    jobs = [job for job in _list(_dict(whole).get("jobs")) if isinstance(job, dict) and _number(job.get("job_id"))]
    found = ProgramRows()
    if not jobs:
        return found
    job = jobs[-1]
    number = _number(job["job_id"])
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {number}, was read"
    places = [match.start() for match in re.finditer(rf'"job_id"\s*:[^,]*?\b{number}\b', text)]
    line = text.count("\n", 0, places[-1]) + 1 if places else 1
    found.log_events = [event for row in _rows(job, str(number)) if (event := end_of_job(row, line)) is not None]
    found.problem = with_state(found.problem, {"JobID": str(number), **_row(job)})
    return found


def _rows(job: dict[str, Any], number: str) -> Iterator[dict[str, str]]:
    """Rows of the job, then of its steps, in the form of `sacct`."""
    yield {"JobID": number, **_row(job)}
    for step in _list(job.get("steps")):
        fields = _dict(step)
        name = str(_dict(fields.get("step")).get("id") or "step")
        yield {"JobID": name if name.startswith(f"{number}.") else f"{number}.{name}", **_row(fields)}


def _row(fields: dict[str, Any]) -> dict[str, str]:
    state = _dict(fields.get("state")).get("current") or fields.get("job_state") or fields.get("state")
    code, nodes = _dict(fields.get("exit_code")), fields.get("nodes")
    signal = _dict(code.get("signal"))
    end_s = _number(_dict(fields.get("time")).get("end") or fields.get("end_time"))
    return {
        "State": str(state[0]) if isinstance(state, list) and state else state if isinstance(state, str) else "",
        "ExitCode": f"{_number(code.get('return_code'))}:{_number(signal.get('signal_id') or signal.get('id'))}",
        "NodeList": nodes if isinstance(nodes, str) else str(_dict(nodes).get("range") or ""),
        "End": datetime.fromtimestamp(end_s, UTC).strftime("%Y-%m-%dT%H:%M:%S") if 0 < end_s < 1 << 33 else "",
    }


def _number(value: object) -> int:
    """Read a number in either form; 0 if it is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else 0
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else 0


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
