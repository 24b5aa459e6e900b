"""Read Slurm's `sacct`, parsable (`-p`, `-P`) or as a table: how the job and its steps ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "sacct of Slurm"
_RULE = re.compile(r"^\s*-+(?:\s+-+)+\s*$")
_ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "TIMEOUT": ("slurm_cancelled", {"reason": "TIME LIMIT"}),
    "DEADLINE": ("slurm_cancelled", {"reason": "DEADLINE"}),
    "OUT_OF_MEMORY": ("slurm_oom", {}),
    "NODE_FAIL": ("node_failed", {}),
    "BOOT_FAIL": ("node_failed", {}),
    "PREEMPTED": ("preempted", {}),
    "CANCELLED": ("slurm_cancelled", {"reason": ""}),
    "COMPLETED": ("finished", {}),
}
"""Slurm state -> kind and fields of the log event."""
_STEP_KINDS = ("slurm_oom",)
"""Kinds that are also reported from the row of a job step."""
_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "REQUEUED", "RESIZING")
"""States of a job that has not ended."""
_EXIT = re.compile(r"^(?P<code>\d+):(?P<signal>\d+)$")
_JOB_COLUMNS = {"JobID", "JobIDRaw"}
HEADER_LINES = 5
"""Number of lines in which the header is searched for: a shell prompt may precede it."""


def recognise(first: bytes) -> bool:
    """Return True for a header with job ID and state."""
    lines = first.decode("utf-8", "replace").splitlines()
    return _header(lines) is not None


def read(path: Path) -> ProgramRows:
    """Read the rows of the last job in the list."""
    text = read_text(path, DOCUMENT_BYTES)
    rows = [(number, row) for number, row in _rows(text.splitlines()) if row.get("State")]
    found = ProgramRows()
    jobs = list(dict.fromkeys(_job(row) for _, row in rows))
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {jobs[-1]}, was read"
    found.log_events = [
        event for number, row in rows if _job(row) == jobs[-1] and (event := end_of_job(row, number)) is not None
    ]
    if not found.log_events and rows:
        found.problem = with_state(found.problem, rows[-1][1])
    return found


def with_state(problem: str, row: dict[str, str]) -> str:
    """Append to a file's `problem` that the job has not ended, if its state says so."""
    state = _state(row["State"]) if row.get("State") else ""
    live = f"lists job {_job(row)} as {state}: it has not ended" if state in _LIVE else ""
    return "; ".join(text for text in (problem, live) if text)


def end_of_job(row: dict[str, str], line: int) -> dict[str, Any] | None:
    """Log event for the row of a job or step; None if it has not ended, or if another row reports the end."""
    state = _state(row["State"]) if row["State"] else ""
    kind, fields = _ENDS.get(state, ("", {}))
    if state == "FAILED" and (end := _EXIT.match(row.get("ExitCode", ""))) and end.groups() != ("0", "0"):
        kind = "process_terminated"
        fields = {"number": int(end["signal"])} if end["signal"] != "0" else {"exitcode": int(end["code"])}
    if not kind or ("." in _number(row) and kind not in _STEP_KINDS):
        return None
    text = " ".join(f"{name}={value}" for name, value in row.items() if value)
    nodes = row.get("NodeList", "")
    is_host = kind not in ("process_terminated", "finished") and re.fullmatch(r"[\w.-]+", nodes)
    return {
        "kind": kind, "line": line, "message": text[:400], "wall_ns": wall_ns_of(row.get("End")),
        "fields": {**fields, **({"host": nodes} if is_host else {}), "job": _job(row)},
    }  # fmt: skip


def _header(lines: list[str]) -> int | None:
    """Index of the line with the column names."""
    for place, line in enumerate(lines[:HEADER_LINES]):
        names = re.split(r"\W+", line.strip())
        is_first = names[0] in _JOB_COLUMNS or _separator(line) or any(map(_RULE.match, lines[place + 1 : place + 2]))
        if is_first and "=" not in line and "State" in names and not _JOB_COLUMNS.isdisjoint(names):
            return place
    return None


def _separator(head: str) -> str:
    """Separator of the columns, of any length; empty for a table."""
    marks = set(re.findall(r"[^\w\s]+|\t", head.strip()))
    return marks.pop() if len(marks) == 1 else ""


def _rows(lines: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    top = _header(lines)
    if top is None:
        return
    head, below = lines[top], lines[top + 1 :]
    if mark := _separator(head):
        names = head.strip().strip(mark).split(mark)
        for number, line in enumerate(below, top + 2):
            yield number, dict(zip(names, (value.strip() for value in line.split(mark)), strict=False))
        return
    widths = [match.span() for match in re.finditer(r"-+", below[0])] if below and _RULE.match(below[0]) else []
    names = [head[begin:end].strip() for begin, end in widths]
    for number, line in enumerate(below[1:], top + 3):
        values = [line[begin:end].strip() for begin, end in widths]
        if any(not line[end : end + 1].isspace() for _, end in widths if end < len(line)):
            # copying has lost the alignment of the columns
            values = line.split() if len(line.split()) == len(names) else values
        yield number, dict(zip(names, values, strict=True))


def _state(text: str) -> str:
    """First word of a state, completed if the column truncated it (`OUT_OF_ME+`, `CANCELLED+`)."""
    word = text.split()[0]
    if not word.endswith("+"):
        return word
    return next((state for state in (*_ENDS, "FAILED") if state.startswith(word[:-1])), word)


def _number(row: dict[str, str]) -> str:
    return row.get("JobID") or row.get("JobIDRaw") or ""


def _job(row: dict[str, str]) -> str:
    return _number(row).split(".")[0]


def wall_ns_of(text: str | None) -> int | None:
    try:
        return int(datetime.fromisoformat(text or "").replace(tzinfo=UTC).timestamp() * 1e9)
    except ValueError:
        return None
