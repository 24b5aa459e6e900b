"""Read files of programs around training, and join their rows.

read = ReadPrograms()
read.take(path, "sacct", "slurm/sacct.txt", problems)
read.steps(problems, steps_of_logs)                   # joined with the steps that text logs print
read.log_events()                                     # to be joined with those of text logs
read.health(), read.stacks()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.programs.registry import name_of, read_program
from store.readers.programs.rows import ProgramRows, StackOfProcess
from store.readers.untrusted.external_files import SourceError, Survey

__all__ = ["ReadPrograms"]

SAME_RATIO = 1e-3
"""Relative tolerance: two files may print the same loss with different precision."""
SAME_PRINTED_RATIO = 0.02
"""The same for a log, which may print two decimals."""
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

    @property
    def has_only_steps(self) -> bool:
        """Return True if no file tells of anything but steps."""
        return not any(rows.log_events or rows.health or rows.stacks for rows in self.rows.values())

    def log_events(self) -> list[dict[str, Any]]:
        """Log events of all files."""
        return [event for rows in self.rows.values() for event in rows.log_events]

    def steps(self, problems: Survey, logged: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Steps of one run, with those that its logs print.

        A file with different values for the same steps is of another run, and left out. The lines of a log without
        step numbers (transformers) are counted, and cannot be joined with steps: the side with more losses is kept.
        """
        numbered = {(row["rank"], row["step"]): row for row in logged if not row.get("is_counted")}
        own = self._steps(problems, numbered)
        counted = Counter(row["rank"] for row in logged if row.get("is_counted") and row.get("loss") is not None)
        stated = Counter(row["rank"] for row in own if row.get("loss") is not None)
        left_out = {rank for rank in counted if 2 * stated[rank] < counted[rank]}
        of_logs = [row for row in logged if not row.get("is_counted") or row["rank"] not in set(stated) - left_out]
        return [*of_logs, *(row for row in own if row["rank"] not in left_out)]

    def _steps(self, problems: Survey, numbered: Mapping[tuple[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Steps that the logs do not print. Of a step that they do, only what they lack is added to their row."""
        kept: dict[tuple[int, int], dict[str, Any]] = {}
        for shown, rows in self.rows.items():
            here = [(row, numbered[key]) for row in rows.steps if (key := (row["rank"], row["step"])) in numbered]
            odd = [row for row, known in here if _differs(row, known, SAME_PRINTED_RATIO)]
            if 2 * len(odd) > len(here):
                problems.add_problem(
                    Path(shown), f"differs from the logs in the loss at step {odd[0]['step']}: a second run?"
                )
                continue
            other = next((row for row in rows.steps if _differs(row, kept.get((row["rank"], row["step"])))), None)
            if other is not None:
                problems.add_problem(
                    Path(shown), f"differs from the files before it in the loss at step {other['step']}: a second run?"
                )
                continue
            for row in rows.steps:
                key = (row["rank"], row["step"])
                known = numbered[key] if key in numbered else kept.setdefault(key, row)
                if known is not row:
                    _add(row, known)
        return list(kept.values())

    def health(self) -> list[dict[str, Any]]:
        """Device readings of all files."""
        return [row for rows in self.rows.values() for row in rows.health]

    def stacks(self) -> list[StackOfProcess]:
        """Stacks of all files."""
        return [stack for rows in self.rows.values() for stack in rows.stacks]


def _add(row: Mapping[str, Any], known: dict[str, Any]) -> None:
    """Add what a step's row lacks. A time between two lines is told by `is_between`, which belongs to its duration."""
    names = [name for name in row if name != "is_between" or known.get("duration_ns") is None]
    known |= {name: row[name] for name in names if known.get(name) is None}


def _differs(row: Mapping[str, Any], known: Mapping[str, Any] | None, ratio: float = SAME_RATIO) -> bool:
    one, other = row.get("loss"), known.get("loss") if known else None
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    return not math.isclose(one, other, rel_tol=ratio, abs_tol=ratio)
