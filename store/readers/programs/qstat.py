"""Read what OpenPBS reports on an ended job (`qstat -fx`, also `-F json`): its exit status, or the exceeded limit."""

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

NAME = "qstat -f of PBS"
_STATES = {"R": "RUNNING", "Q": "PENDING", "H": "PENDING", "W": "PENDING", "E": "COMPLETING", "S": "SUSPENDED"}
_LIMITS = {-29: "TIMEOUT", -28: "TIMEOUT", -27: "OUT_OF_MEMORY", -26: "OUT_OF_MEMORY"}
"""Exit statuses for an exceeded limit: wall time, CPU time, memory, virtual memory (OpenPBS, `job.h`)."""
_SIGNALS = 256
"""Exit status of a job script that died of signal n: 256 + n."""
_FIELD = re.compile(r"^\s{4}([A-Za-z][\w.]*) = (.*)$")


def recognise(first: bytes) -> bool:
    """Return True for a job's attributes as text or JSON."""
    if first.lstrip()[:1] == b"{":
        return b'"pbs_version"' in first and b'"Jobs"' in first
    return first.lstrip().startswith(b"Job Id: ") and b"\n    job_state = " in first


def read(path: Path) -> ProgramRows:
    """Read the last job in the list. Raises SourceError."""
    text = read_text(path, DOCUMENT_BYTES)
    jobs = list(_of_json(text) if text.lstrip()[:1] == "{" else _of_text(text))
    found = ProgramRows()
    if not jobs:
        return found
    line, number, attributes = jobs[-1]
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {number}, was read"
    row = {"JobID": number.split(".")[0], **_row(attributes)}
    event = end_of_job(row, line) if row["State"] else None
    found.log_events = [event] if event else []
    found.problem = with_state(found.problem, row)
    if not row["State"] and "Exit_status" in attributes:
        status = attributes["Exit_status"][:10]
        found.problem = found.problem or f"reports PBS' exit status {status}, whose cause is not known"
    return found


def _row(attributes: dict[str, str]) -> dict[str, str]:
    """The job in the form of `sacct`."""
    state, status = attributes.get("job_state", ""), attributes.get("Exit_status", "")
    code = int(status) if re.fullmatch(r"-?\d{1,6}", status) else None
    hosts, end = attributes.get("exec_host", ""), attributes.get("obittime") or attributes.get("mtime", "")
    shown = {"NodeList": "" if "+" in hosts else hosts.split("/")[0], "End": _time(end),
             "Comment": attributes.get("comment", "")}  # fmt: skip
    if code is None:
        return {"State": _STATES.get(state, ""), "ExitCode": "", **shown}
    if code <= 0:
        return {"State": "COMPLETED" if code == 0 else _LIMITS.get(code, ""), "ExitCode": "0:0", **shown}
    code, signal = (0, code - _SIGNALS) if code > _SIGNALS else (code, 0)
    return {"State": "FAILED", "ExitCode": f"{code}:{signal}", **shown}


def _time(text: str) -> str:
    try:
        return datetime.strptime(text, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return ""


def _of_text(text: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield (line, job id, attributes). A long value continues on a line that begins with a tab."""
    line, number, attributes, last = 0, "", dict[str, str](), ""
    for place, row in enumerate(text.splitlines(), 1):
        if row.startswith("Job Id: "):
            if number:
                yield line, number, attributes
            line, number, attributes, last = place, row.removeprefix("Job Id: ").strip(), {}, ""
        elif field := _FIELD.match(row):
            last = field[1]
            attributes[last] = field[2]
        elif row.startswith("\t") and last:
            attributes[last] += row[1:]
    if number:
        yield line, number, attributes


def _of_json(text: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    try:
        whole: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError("is cut off or not JSON") from error
    jobs = whole.get("Jobs") if isinstance(whole, dict) else None
    for number, attributes in jobs.items() if isinstance(jobs, dict) else ():
        line = text.count("\n", 0, text.find(f'"{number}"')) + 1
        plain = attributes.items() if isinstance(attributes, dict) else ()
        yield line, str(number), {name: str(value) for name, value in plain if isinstance(value, str | int)}
