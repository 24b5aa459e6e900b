"""Read files of the other programs of a job (`store.readers.programs`), and join their rows.

read = ReadPrograms()
read.take(path, "sacct", "slurm/sacct.txt", problems)
read.steps(problems, steps_of_logs)                   # joined with the steps that text logs print
read.log_events()                                     # to be joined with the events of text logs
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
from store.readers.programs.rows import EVALUATION, ProgramRows, StackOfProcess
from store.readers.untrusted.external_files import SourceError, Survey

__all__ = ["ReadPrograms"]

SAME_RATIO = 1e-3
"""Relative and absolute tolerance: two files may print the same loss with different precision."""
SAME_PRINTED_RATIO = 0.02
"""The same tolerance for a log, which may print only two decimals."""
MANY = 2
"""A file and a log that number their steps differently cannot be joined, so only one of them is used. This is normally
the one with true step numbers, but the other one is used if it has more than this many times as many losses.
"""
MIN_COMMON = 5
"""Minimum number of steps in common that show that a file counts samples."""
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
        """Return True if the files hold nothing but steps and evaluations."""
        events = [event for event in self.log_events() if event["kind"] != EVALUATION]
        return not events and not any(rows.health or rows.stacks for rows in self.rows.values())

    def log_events(self) -> list[dict[str, Any]]:
        """Log events of all files."""
        return [event for rows in self.rows.values() for event in rows.log_events]

    def steps(self, problems: Survey, logged: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Steps of one run, joined with those that its logs print.

        1. A file with other losses for the same steps belongs to another run and is left out.
        2. DeepSpeed's monitor counts samples. If the losses match the losses in the logs once the sample counts are
           divided by a constant, the counts are converted to steps.
        3. Any other file that has no step in common with the logs, although their ranges overlap, counts differently:
           the logs' steps are kept, unless the file has far more losses.
        4. A log without step numbers (transformers) has the numbers of its lines instead: the files' steps are kept,
           unless the log has far more losses.
        """
        numbered = {(row["rank"], row["step"]): row for row in logged if not row.get("is_counted")}
        from_files, without_log = self._steps(problems, numbered)
        counted = Counter(row["rank"] for row in logged if row.get("is_counted") and row.get("loss") is not None)
        stated = Counter(row["rank"] for row in from_files if row.get("loss") is not None)
        left_out = {rank for rank in counted if MANY * stated[rank] < counted[rank]}
        without_lines = set(stated) - left_out
        from_logs = [
            row for row in logged if row["rank"] not in (without_lines if row.get("is_counted") else without_log)
        ]
        return [*from_logs, *(row for row in from_files if row["rank"] not in left_out)]

    def _steps(
        self, problems: Survey, numbered: Mapping[tuple[int, int], dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], set[int]]:
        """Return the steps that the logs do not print, and the ranks whose logs count differently and are left out. If
        the logs print a step, the files only fill in the values that its row lacks.
        """
        kept: dict[tuple[int, int], dict[str, Any]] = {}
        printed = Counter(rank for (rank, _), row in numbered.items() if row.get("loss") is not None)
        without_log: set[int] = set()
        for shown, file_rows in self.rows.items():
            rows = _in_steps(file_rows.steps, numbered)
            common = [(row, numbered[key]) for row in rows if (key := (row["rank"], row["step"])) in numbered]
            differing = [row for row, known in common if _differs(row, known, SAME_PRINTED_RATIO)]
            conflict = next((row for row in rows if _differs(row, kept.get((row["rank"], row["step"])))), None)
            stated = Counter(row["rank"] for row in rows if row.get("loss") is not None)
            disjoint = (
                set() if common else {rank for rank in stated if printed[rank] and _overlap(rank, rows, numbered)}
            )
            if 2 * len(differing) > len(common):
                problem = f"differs from the logs in the loss at step {differing[0]['step']}: a second run?"
            elif conflict is not None:
                problem = f"differs from the files before it in the loss at step {conflict['step']}: a second run?"
            elif any(MANY * printed[rank] >= stated[rank] for rank in disjoint):
                problem = "has no step in common with the logs, so it counts in another way: its steps were left out"
            else:
                problem = ""
                without_log |= disjoint
            if problem:
                problems.add_problem(Path(shown), problem)
                continue
            for row in rows:
                key = (row["rank"], row["step"])
                known = numbered[key] if key in numbered else kept.setdefault(key, row)
                if known is not row:
                    _fill_gaps(row, known)
        return list(kept.values()), without_log

    def health(self) -> list[dict[str, Any]]:
        """Device readings of all files."""
        return [row for rows in self.rows.values() for row in rows.health]

    def stacks(self) -> list[StackOfProcess]:
        """Stacks of all files."""
        return [stack for rows in self.rows.values() for stack in rows.stacks]


def _in_steps(
    rows: list[dict[str, Any]], numbered: Mapping[tuple[int, int], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows. Samples are converted to steps if the losses then match the losses in the logs."""
    if not rows or not numbered or any((row["rank"], row["step"]) in numbered for row in rows):
        return rows
    first = min(row["step"] for row in rows)
    divisors = {math.gcd(*(row["step"] for row in rows)), first // max(1, min(step for _, step in numbered))}
    for samples in sorted(divisors - {0, 1}, reverse=True):
        found = [
            {**row, "step": row["step"] // samples,
             "duration_ns": row["duration_ns"] * samples if row.get("is_between") else row.get("duration_ns")}
            for row in rows if row["step"] % samples == 0
        ]  # fmt: skip
        both = [(row, numbered[key]) for row in found if (key := (row["rank"], row["step"])) in numbered]
        same = sum(row.get("loss") is not None and known.get("loss") is not None
                   and not _differs(row, known, SAME_PRINTED_RATIO) for row, known in both)  # fmt: skip
        if len(both) >= MIN_COMMON and 2 * same > len(both):
            return found
    return rows


def _overlap(
    rank: int, rows: Sequence[Mapping[str, Any]], numbered: Mapping[tuple[int, int], Mapping[str, Any]]
) -> bool:
    """Return True if the step ranges of a file and of the rank's logs overlap. Ranges that do not overlap may belong to
    two attempts, so they are no sign of different numbering."""
    steps: list[int] = [row["step"] for row in rows if row["rank"] == rank]
    logged = [step for logged_rank, step in numbered if logged_rank == rank]
    return min(steps) <= max(logged) and min(logged) <= max(steps)


def _fill_gaps(row: Mapping[str, Any], known: dict[str, Any]) -> None:
    """Fill in values that a step's row lacks. `is_between` is copied only with the duration that it qualifies."""
    names = [name for name in row if name != "is_between" or known.get("duration_ns") is None]
    known |= {name: row[name] for name in names if known.get(name) is None}


def _differs(row: Mapping[str, Any], known: Mapping[str, Any] | None, ratio: float = SAME_RATIO) -> bool:
    one, other = row.get("loss"), known.get("loss") if known else None
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    return not math.isclose(one, other, rel_tol=ratio, abs_tol=ratio)
