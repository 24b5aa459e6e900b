"""Lines on the files that were read, and on those that could not be read completely, for every form of a report.

for label, text in file_lines(diagnosis.run): ...     # ("Damaged", "telemetry.duckdb: is damaged: ...")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from store.derived.node_clocks import CLOCK_WAS

__all__ = ["file_lines"]

MAX_FILES = 10


def file_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The number of files if several were judged as one job, then a line for each of the first ten files with a
    problem, and the number of the others.
    """
    num_read = sum((facts.get("files_read") or {}).values())
    read = [("Read", f"{num_read:,} files, judged as one job")] if num_read > 1 else []
    problems = facts.get("file_problems") or []
    # If files of other programs were judged, links and duplicate files are listed, too.
    label = "Left out" if "input" in facts else "Damaged"
    lines = [
        ("Clock" if CLOCK_WAS in found["problem"] else label, f"{found['path']}: {found['problem']}")
        for found in problems[:MAX_FILES]
    ]
    if len(problems) > MAX_FILES:
        lines.append(("", f"... and {len(problems) - MAX_FILES} more files"))
    return read + lines
