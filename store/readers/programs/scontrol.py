"""Read the `Name=value` listings of Slurm's `scontrol show`: one block of lines per object.

is_listing(first, "JobId", "JobState")                # True for a listing of jobs
blocks(text, "JobId")                                 # [(line of its first field, {"JobId": "71", ...}), ...]
"""

from __future__ import annotations

import re

from store.readers.programs.sacct import HEADER_LINES

__all__ = ["blocks", "is_listing"]

_FIELD = re.compile(r"(?:^|\s)([A-Z]\w+)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")


def is_listing(first: bytes, first_field: str, other_field: str) -> bool:
    """Return True if one of the first lines begins an object with `first_field`, and `first` contains `other_field`."""
    lines = first.lstrip().splitlines()[:HEADER_LINES]  # a shell prompt may precede it
    return (
        any(line.lstrip().startswith(f"{first_field}=".encode()) for line in lines)
        and f"{other_field}=".encode() in first
    )


def blocks(text: str, first_field: str) -> list[tuple[int, dict[str, str]]]:
    """Objects of a listing, as (number of the first line, fields)."""
    found: list[tuple[int, dict[str, str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in _FIELD.findall(line):
            if name == first_field:
                found.append((number, {}))
            if found:
                found[-1][1].setdefault(name, value)
    return found
