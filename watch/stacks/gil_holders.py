"""Find ranks that sleep in C while holding the GIL: the process lives, but no Python code in it can run.

    gil_holders({3: 4711})        # [3]

A rank's stack dump does not show this, because the C signal handler that writes it needs no GIL. py-spy, which reads
the memory of a process from outside, shows which thread holds the GIL. The proof is a thread that holds the GIL and
sleeps with the same frames in two samples. A running thread does not count, since it may be in a Python loop. If py-spy
is missing or lacks permission, no rank is returned.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from watch.stacks.pyspy import StacksError, program

__all__ = ["gil_holders"]

BETWEEN_S = 0.25
"""Seconds between the two samples, longer than a page fault or a short wait with the GIL held."""
SAMPLE_LIMIT_S = 2.0
"""Time limit of one sample in seconds, because the restart of the run waits for it."""
MAX_RANKS = 4


def gil_holders(pids: Mapping[int, int]) -> list[int]:
    """Return the ranks of {rank: pid} that sleep while holding the GIL; samples the first `MAX_RANKS` of them."""
    try:
        spy = program()
    except StacksError:
        return []
    sampled = dict(sorted(pids.items())[:MAX_RANKS])
    first = {rank: place for rank, pid in sampled.items() if (place := _asleep_with_gil(spy, pid)) is not None}
    if not first:
        return []
    time.sleep(BETWEEN_S)
    return [rank for rank, place in first.items() if _asleep_with_gil(spy, sampled[rank]) == place]


def _asleep_with_gil(spy: str, pid: int) -> tuple[Any, ...] | None:
    """Id and frames of a thread that holds the GIL and sleeps; None if there is none, or it is unknown."""
    command = [spy, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_LIMIT_S, check=False)
        threads = json.loads(done.stdout) if done.returncode == 0 else []
        for thread in threads:
            if thread["owns_gil"] and not thread["active"]:
                return (thread["os_thread_id"], *((frame["filename"], frame["line"]) for frame in thread["frames"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        pass  # the holder of the GIL is only additional evidence, so the hang is reported without it
    return None
