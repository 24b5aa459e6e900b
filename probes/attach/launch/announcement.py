"""Tell the launcher which run folder and attempt its ranks have chosen.

    announce(run, attempt)                  # local rank 0, once it records
    announce(run, attempt, watch=Watch())   # and ask the launcher to supervise a watch
    found = announced(path)                 # the launcher: Announcement(run=..., attempt=...), or None so far

The ranks choose the run's folder by themselves, under any launcher. A launcher that needs to know it sets
RANKSCOPE_ANNOUNCE_FILE to a file name.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ...tape.rundir import RunDir

__all__ = ["VARIABLE", "Announcement", "Watch", "announce", "announced"]

VARIABLE = "RANKSCOPE_ANNOUNCE_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Facts for the watch of a node; `digests` as in `watch_process.digest_address`."""

    node_rank: int = 0
    num_nodes: int = 1
    digests: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A run's folder, its newest attempt, and the `watch` process that the launcher has to keep alive."""

    run: Path
    attempt: int
    watch: Watch | None = None


def announce(run: RunDir, attempt: int, watch: Watch | None = None) -> None:
    """Write the announcement if the launcher asked for one. Raises OSError if the file cannot be written."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        fresh = Path(f"{wanted}.{os.getpid()}")
        facts = {"run": str(run.path.absolute()), "attempt": attempt, "watch": asdict(watch) if watch else None}
        fresh.write_text(json.dumps(facts), encoding="utf-8")
        fresh.replace(wanted)


def announced(path: Path) -> Announcement | None:
    """Read an announcement; None while there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    watch = Watch(**found["watch"]) if found["watch"] else None
    return Announcement(run=Path(found["run"]), attempt=int(found["attempt"]), watch=watch)
