"""Read tables of `dcgmi diag` and `dcgmi health -c`: failed tests of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "dcgmi diag or health"
MAX_TEXT = 300
_SETTINGS = re.compile(
    r"denylist|blacklist|nvml|cuda|permission|persistence|environment|graphics|software|eud|overall|metadata|version|"
    r"device ids|skip",
    re.IGNORECASE,
)
"""Tests of the host's configuration, and rows that are not tests."""
_REMARK = re.compile(r"^(?:warning|error|info)\b", re.IGNORECASE)
_DEVICE = re.compile(r"^(?:->|GPU ID:?|GPU) *(\d+)$")
_GPU_RESULT = re.compile(r"^GPUs?:? ?(\d+): (\w+)")
"""DCGM 4 lists the result of each GPU below the test."""
_GPUS = re.compile(r"\bGPUs?(?:: ?| )?(\d+(?: ?, ?\d+)*)")


@dataclass(slots=True)
class _Row:
    line: int
    left: str
    right: list[str] = field(default_factory=list)


def recognise(first: bytes) -> bool:
    """Return True if the title of either table is found."""
    return (b"| Diagnostic " in first and b"| Result " in first) or b"Health Monitor Report" in first


def read(path: Path) -> ProgramRows:
    """Read the failed tests, each with the text below it."""
    found, host = ProgramRows(), host_of_log(path)
    for line, test, devices, text in _failed(_rows(read_text(path, DOCUMENT_BYTES).splitlines())):
        found.log_events.append(failed_test(test, devices, text, line, host))
    return found


def failed_test(test: str, devices: list[str], text: str, line: int, host: str | None) -> dict[str, Any]:
    """Log event for a test that failed on these GPUs."""
    return {
        "kind": "device_check_failed", "line": line, "wall_ns": None, "host": host,
        "message": f"{test}: {text}"[:MAX_TEXT],
        "fields": {"test": test, "devices": ", ".join(devices), "text": text[:MAX_TEXT]},
    }  # fmt: skip


def is_of_gpu(test: str) -> bool:
    """Return False for a test of the host's configuration."""
    return _SETTINGS.search(test) is None


def _rows(lines: list[str]) -> list[_Row]:
    """Rows of two cells; a row with an empty left cell continues the previous row."""
    rows: list[_Row] = []
    for number, line in enumerate(lines, 1):
        cells = line.strip().strip("|").split("|")
        if not line.lstrip().startswith("|") or len(cells) < 2 or "---" in line:
            continue
        left, right = cells[0].strip(), " ".join(cells[1:]).strip()
        if left or not rows:
            rows.append(_Row(number, left, [right] if right else []))
        elif right:
            rows[-1].right.append(right)
    return rows


def _failed(rows: list[_Row]) -> Iterator[tuple[int, str, list[str], str]]:
    """Yield (line, test, GPUs, text) of each failed test. The GPUs of a test are taken from the first of these that
    names any: the results below the test, its text, the heading above it.
    """
    device = ""
    for place, row in enumerate(rows):
        if match := _DEVICE.match(row.left):
            device = match[1]
            continue
        test = row.left.removeprefix("->").strip()
        result = row.right[0] if row.right else ""
        if ": " in result and result.split(": ", 1)[1].startswith("Fail"):
            test, result = result.split(": ", 1)  # DCGM before 2.0: "PCIe system: Failure - ..."
        if not result.startswith("Fail") or not test or not is_of_gpu(test) or _REMARK.match(test):
            continue
        remarks: list[str] = []
        for later in rows[place + 1 :]:
            if not _REMARK.match(later.left):
                break
            remarks += [later.left.partition(":")[2], *later.right]
        shown = [part for part in row.right[1:] if not _GPU_RESULT.match(part)]
        listed = [one for part in row.right[1:] if (one := _GPU_RESULT.match(part)) and one[2].startswith("Fail")]
        text = " ".join(part for part in (row.right[0], *shown, *remarks) if part).strip()
        result = " ".join(part for part in (*shown, *remarks) if part).strip() or text
        numbers = [one[1] for one in listed]
        numbers = numbers or [number.strip() for match in _GPUS.finditer(text) for number in match[1].split(",")]
        yield row.line, test, sorted(dict.fromkeys(numbers or ([device] if device else [])), key=int), result
