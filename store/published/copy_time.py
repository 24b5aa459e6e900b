"""The time up to which a run's records are complete. Diagnoses describe the run as of that time.

    now_ns = recorded_until_ns(run)      # now, unless it is a copy of a published run
    now_ns = stored_until_ns(run)        # for readers of the stores alone, which may lag behind the tapes

A copy lags some seconds behind its run, and a store behind its tapes. This lag must not look like a standstill.
"""

from __future__ import annotations

import json
import time

from probes.tape.files.safe_open import read_plain
from probes.tape.rundir import RunDir
from store.database import ingested_until_ns

__all__ = ["is_copy", "recorded_until_ns", "stored_until_ns", "write_recorded_until"]

NAME = "published.json"
MAX_BYTES = 1 << 16


def write_recorded_until(run: RunDir, wall_ns: int) -> None:
    """Record the time up to which the copy has the records of all nodes."""
    path = run.path / NAME
    fresh = path.with_name(f".{NAME}")
    fresh.write_text(json.dumps({"recorded_until_ns": wall_ns}), encoding="utf-8")
    fresh.replace(path)


def is_copy(run: RunDir) -> bool:
    """Return True if the folder is a local copy of a run that was published to a folder or bucket. Such a copy has no
    files of ranks, and no `watch` writes it."""
    return (run.path / NAME).exists()


def recorded_until_ns(run: RunDir) -> int:
    """Time up to which all records are present (epoch nanoseconds); the current time if the folder is not a copy."""
    try:
        found = json.loads(read_plain(run.path / NAME, MAX_BYTES))["recorded_until_ns"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return time.time_ns()
    return found if isinstance(found, int) else time.time_ns()


def stored_until_ns(run: RunDir) -> int:
    """Time up to which the run's stores are complete (epoch nanoseconds); the current time if nothing writes them."""
    return recorded_until_ns(run) if is_copy(run) else ingested_until_ns(run.stores())
