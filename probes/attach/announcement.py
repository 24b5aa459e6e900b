"""Announce a run to the launcher that started its ranks: which folder the ranks chose, and which attempt they are.

    announce(run, attempt)                  # local rank 0, once it records
    found = announced(path)                 # the launcher: Announcement(path, attempt), or None so far

The ranks choose the run's folder by themselves, under any launcher. One that wants to know it names a file in
RANKSCOPE_ANNOUNCE_FILE.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ..tape.rundir import RunDir

__all__ = ["VARIABLE", "Announcement", "announce", "announced"]

VARIABLE = "RANKSCOPE_ANNOUNCE_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A run's folder and its newest attempt."""

    run: Path
    attempt: int


def announce(run: RunDir, attempt: int) -> None:
    """Write the announcement, where one is asked for. Raises OSError if the file cannot be written."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        fresh = Path(f"{wanted}.{os.getpid()}")
        fresh.write_text(json.dumps({"run": str(run.path.absolute()), "attempt": attempt}), encoding="utf-8")
        fresh.replace(wanted)


def announced(path: Path) -> Announcement | None:
    """Read an announcement; None while there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return Announcement(run=Path(found["run"]), attempt=int(found["attempt"]))
