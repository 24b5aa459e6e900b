"""Output of Slurm's `sacct`, parsable (`-p`, `-P`) or as a table: how the job and its steps ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.readers.external_files import read_whole
from store.readers.programs.rows import ProgramRows

NAME = "sacct of Slurm"
MAX_BYTES = 64 << 20
_RULE = re.compile(r"^\s*-+(?:\s+-+)+\s*$")
_ENDS: dict[str, tuple[str, dict[str, str]]] = {
    "TIMEOUT": ("slurm_cancelled", {"reason": "TIME LIMIT"}),
    "DEADLINE": ("slurm_cancelled", {"reason": "DEADLINE"}),
    "OUT_OF_MEMORY": ("slurm_oom", {}),
    "OUT_OF_ME+": ("slurm_oom", {}),
    "NODE_FAIL": ("node_failed", {}),
    "BOOT_FAIL": ("node_failed", {}),
    "PREEMPTED": ("preempted", {}),
    "CANCELLED": ("slurm_cancelled", {"reason": ""}),
    "CANCELLED+": ("slurm_cancelled", {"reason": ""}),
    "COMPLETED": ("finished", {}),
}
"""State of a job -> kind of the event, and its fields. FAILED says no more than that a process ended: the logs do."""
_OF_STEPS = ("slurm_oom",)


def recognise(first: bytes) -> bool:
    """Return True for a header with the job's number and state."""
    header = first.split(b"\n", 1)[0].decode("utf-8", "replace")
    names = re.split(r"[|\s]+", header.strip())
    return names[0] in ("JobID", "JobIDRaw") and "State" in names


def read(path: Path) -> ProgramRows:
    """Read the rows of the last job that is listed."""
    text = read_whole(path, MAX_BYTES)[0].decode("utf-8", "replace")
    rows = [(number, row) for number, row in _rows(text.splitlines()) if row.get("State")]
    found = ProgramRows()
    jobs = list(dict.fromkeys(_job(row) for _, row in rows))
    if len(jobs) > 1:
        found.problem = f"lists {len(jobs)} jobs: only the last, {jobs[-1]}, was read"
    for number, row in rows:
        if _job(row) != jobs[-1]:
            continue
        kind, fields = _ENDS.get(row["State"].split()[0], ("", {}))
        if not kind or ("." in _number(row) and kind not in _OF_STEPS):
            continue
        text = " ".join(f"{name}={value}" for name, value in row.items() if value)
        host = row.get("NodeList", "") if re.fullmatch(r"[\w.-]+", row.get("NodeList", "")) else ""
        event: dict[str, Any] = {
            "kind": kind,
            "line": number,
            "message": text[:400],
            "wall_ns": _wall_ns(row.get("End")),
        }
        event["fields"] = {**fields, **({"host": host} if host and kind != "finished" else {}), "job": jobs[-1]}
        found.log_events.append(event)
    return found


def _rows(lines: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    if not lines:
        return
    if "|" in lines[0]:
        names = lines[0].strip().strip("|").split("|")
        for number, line in enumerate(lines[1:], 2):
            yield number, dict(zip(names, (value.strip() for value in line.split("|")), strict=False))
        return
    widths = (
        [match.span() for match in re.finditer(r"-+", lines[1])] if len(lines) > 1 and _RULE.match(lines[1]) else []
    )
    names = [lines[0][begin:end].strip() for begin, end in widths]
    for number, line in enumerate(lines[2:], 3):
        yield number, {name: line[begin:end].strip() for name, (begin, end) in zip(names, widths, strict=True)}


def _number(row: dict[str, str]) -> str:
    return row.get("JobID") or row.get("JobIDRaw") or ""


def _job(row: dict[str, str]) -> str:
    return _number(row).split(".")[0]


def _wall_ns(text: str | None) -> int | None:
    try:
        return int(datetime.fromisoformat(text or "").replace(tzinfo=UTC).timestamp() * 1e9)
    except ValueError:
        return None
