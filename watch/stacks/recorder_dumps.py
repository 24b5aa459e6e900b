"""Dumps of torch's flight recorder of all ranks of a node, through the pipe that a thread of torch reads.

The thread is in C++ and takes no GIL, so a rank answers whose Python stands still. It looks at its pipe once a second,
so the wait has a deadline above that. Ranks without a pipe, such as all on gloo, cost nothing.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from probes.tape.dump_pipe import dump_path, pipe_path
from probes.tape.rundir import RunDir

__all__ = ["take_dumps"]

WAIT_S = 3.0
LOOK_S = 0.05


def take_dumps(run: RunDir, attempt: int, ranks: Iterable[int], *, wait_s: float = WAIT_S) -> list[int]:
    """Ask ranks for their dumps; returns those whose dump is there, complete or not growing any more."""
    asked = {rank: _state(dump_path(run, attempt, rank)) for rank in ranks if _ask(pipe_path(run, attempt, rank))}
    sizes: dict[int, tuple[int, int]] = {}
    done: set[int] = set()
    deadline = time.monotonic() + wait_s
    while len(done) < len(asked) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        for rank in asked.keys() - done:
            state = _state(dump_path(run, attempt, rank))
            if state != asked[rank] and state[1] and sizes.get(rank) == state:
                done.add(rank)
            sizes[rank] = state
    return sorted(done)


def _ask(pipe: Path) -> bool:
    """Write a byte; false if there is no pipe, or no thread that reads it."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _state(path: Path) -> tuple[int, int]:
    """(time of the last change, size) of a file; zeros without one."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
