"""Convert the tables of `kubectl get events` and `kubectl get pods` to one log line per event or pod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "kubectl get events or pods"
_BREAK = re.compile(r"\s{2,}|\t")
_READY = re.compile(r"\d+/\d+$")
_EVENTS = ["TYPE", "REASON", "OBJECT", "MESSAGE"]
_PODS = ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
HEADER_LINES = 2
"""The header is searched in this many lines, because a shell prompt may precede it."""


def recognise(first: bytes) -> bool:
    """Return True for the header of either table."""
    return any(_is_header(line) for line in first[:2000].decode("utf-8", "replace").splitlines()[:HEADER_LINES])


def lines(path: Path) -> Iterator[str]:
    """Yield a line per row; rows of other tables as they are."""
    names: list[str] = []
    completed: dict[str, bool] = {}
    for line in read_text(path, DOCUMENT_BYTES).splitlines():
        if _is_header(line):
            names, row = _BREAK.split(line.strip()), dict[str, str]()
        else:
            row = dict(zip(names, _BREAK.split(line.strip(), max(len(names) - 1, 0)), strict=False))
        if "MESSAGE" in row and "/" in row["OBJECT"]:
            yield f"{row['OBJECT']} {row['REASON']}: {row['MESSAGE']}"
        elif "STATUS" in row and _READY.match(row["READY"]):
            completed[row["NAME"]] = row["STATUS"] == "Completed"
            yield f"pod/{row['NAME']} {row['STATUS']}"
        else:
            yield line
    if completed and all(completed.values()):
        yield f"pod/{next(iter(completed))}: phase Succeeded"


def _is_header(line: str) -> bool:
    names = _BREAK.split(line.strip())
    return names[-4:] == _EVENTS or any(names[at : at + 5] == _PODS for at in (0, 1))
