"""Read files of programs around training, and join their rows.

read = ReadPrograms()
read.take(path, "sacct", "slurm/sacct.txt", problems)
read.steps(problems), read.log_events()               # to be joined with those of text logs
read.health(), read.stacks()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.programs.registry import name_of, read_program
from store.readers.programs.rows import ProgramRows, StackOfProcess
from store.readers.untrusted.external_files import SourceError, Survey

__all__ = ["ReadPrograms"]

SAME_RATIO = 1e-3
"""Relative tolerance: two files may print the same loss with different precision."""
NOTHING_IN_IT = "contains no step, no reading and no known failure"


@dataclass(slots=True)
class ReadPrograms:
    """Rows of all files of programs, by their names in the report."""

    rows: dict[str, ProgramRows] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    """Number of files read, by kind."""

    def take(self, path: Path, program: str, shown: str, problems: Survey) -> None:
        """Read a file. What is wrong with it is listed in `problems`."""
        try:
            rows = read_program(program, path, shown=shown)
        except SourceError as error:
            problems.add_problem(Path(shown), f"({name_of(program)}) {error}")
            return
        if rows.problem or not (rows.steps or rows.log_events or rows.health or rows.stacks):
            problems.add_problem(Path(shown), rows.problem or NOTHING_IN_IT)
        self.rows[shown] = rows
        self.names[name_of(program)] += 1

    def log_events(self) -> list[dict[str, Any]]:
        """Log events of all files."""
        return [event for rows in self.rows.values() for event in rows.log_events]

    def steps(self, problems: Survey) -> list[dict[str, Any]]:
        """Steps of one run. A file with different values for the same steps is of another run, and left out."""
        kept: dict[tuple[int, int], dict[str, Any]] = {}
        for shown, rows in self.rows.items():
            other = next((row for row in rows.steps if _differs(row, kept.get((row["rank"], row["step"])))), None)
            if other is not None:
                problems.add_problem(
                    Path(shown), f"differs from the files before it in the loss at step {other['step']}: a second run?"
                )
                continue
            for row in rows.steps:
                known = kept.setdefault((row["rank"], row["step"]), row)
                known |= {name: value for name, value in row.items() if known.get(name) is None}
        return list(kept.values())

    def health(self) -> list[dict[str, Any]]:
        """Device readings of all files."""
        return [row for rows in self.rows.values() for row in rows.health]

    def stacks(self) -> list[StackOfProcess]:
        """Stacks of all files."""
        return [stack for rows in self.rows.values() for stack in rows.stacks]


def _differs(row: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    one, other = row.get("loss"), known.get("loss") if known else None
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    return not math.isclose(one, other, rel_tol=SAME_RATIO, abs_tol=SAME_RATIO)
