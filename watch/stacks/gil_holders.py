"""Ranks that sleep in C while they hold Python's lock: nothing in them runs any more, though the process lives.

    holders({3: 4711})        # [3]

The dump of a rank's stacks is written by a signal handler in C, which needs no lock, so it says nothing of this. py-spy
reads from outside who owns the lock. A thread that owns it and is not running, with the same frames at two looks, is
proof; one that runs may be an endless loop in Python as well, and is left out. Where py-spy is missing or has no right
to look, nothing is said.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from watch.stacks.pyspy import StacksError, program

__all__ = ["holders"]

BETWEEN_S = 0.25
"""Between the two looks (seconds): a page fault or a short wait with the lock held is over by then."""
LOOK_S = 2.0
"""After this (seconds) py-spy is given up: the run waits for whoever asks."""
MAX_RANKS = 4


def holders(pids: Mapping[int, int]) -> list[int]:
    """Of {rank: pid}, the ranks that sleep with the lock held; looks at the first `MAX_RANKS` of them."""
    try:
        spy = program()
    except StacksError:
        return []
    asked = dict(sorted(pids.items())[:MAX_RANKS])
    first = {rank: place for rank, pid in asked.items() if (place := _asleep_with_lock(spy, pid)) is not None}
    if not first:
        return []
    time.sleep(BETWEEN_S)
    return [rank for rank, place in first.items() if _asleep_with_lock(spy, asked[rank]) == place]


def _asleep_with_lock(spy: str, pid: int) -> tuple[Any, ...] | None:
    """Thread and frames of whoever holds the lock and does not run; None if there is none, or nobody can tell."""
    command = [spy, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False)
        threads = json.loads(done.stdout) if done.returncode == 0 else []
        for thread in threads:
            if thread["owns_gil"] and not thread["active"]:
                return (thread["os_thread_id"], *((frame["filename"], frame["line"]) for frame in thread["frames"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        pass  # it is only more to say about a hang that is told anyway
    return None
