"""Request flight-recorder dumps from all ranks of a node, through the pipe that a thread of torch reads.

The C++ thread does not take the GIL, so a rank answers even if its Python code is blocked. It polls its pipe once a
second, so the deadline must be longer. Ranks without a pipe, such as those using gloo, cost nothing.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from probes.tape.dump_pipe import dump_path, pipe_path
from probes.tape.files.safe_open import open_plain
from probes.tape.rundir import RunDir

__all__ = ["ask_for_dump", "file_state", "take_dumps", "wait_for_dumps"]

WAIT_S = 3.0
POLL_S = 0.05
STILL_S = 1.0
"""A dump that lacks the end of a pickle counts as written after this many seconds without a change. Before that, the
writer may only have been interrupted by other processes."""
_PICKLE_END = re.compile(rb"[su](?:q.|r.{4})?\.\Z", re.DOTALL)
"""Last opcodes of a dump, which is a pickled dictionary: set items, memoize, stop."""


def take_dumps(run: RunDir, attempt: int, ranks: Iterable[int], *, wait_s: float = WAIT_S) -> list[int]:
    """Ask ranks for their dumps. Returns the ranks with a complete dump."""
    paths = {rank: dump_path(run, attempt, rank) for rank in ranks}
    before = {path: file_state(path) for path in paths.values()}
    asked = {path: before[path] for rank, path in paths.items() if not ask_for_dump(pipe_path(run, attempt, rank))}
    written = wait_for_dumps(asked, wait_s)
    return sorted(rank for rank, path in paths.items() if path in written)


def wait_for_dumps(before: Mapping[Path, tuple[int, int]], wait_s: float) -> set[Path]:
    """Wait for dump files to be written. `before`: their `file_state` at the time of the request.

    Returns the files that have changed since and are complete: torch creates a file before it writes the content.
    """
    last: dict[Path, tuple[tuple[int, int], float]] = {}  # file -> (last observed state, time of its last change)
    written: set[Path] = set()
    deadline = time.monotonic() + wait_s
    while len(written) < len(before) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for path in before.keys() - written:
            state, now_s = file_state(path), time.monotonic()
            if path not in last or last[path][0] != state:
                last[path] = state, now_s
            elif state != before[path] and state[1] and (now_s - last[path][1] >= STILL_S or _ends_as_pickle(path)):
                written.add(path)
    return written


def ask_for_dump(pipe: Path) -> str:
    """Write to the pipe of a rank. Returns the reason if that failed, for instance because no thread reads it."""
    try:
        # O_NONBLOCK: fails at once if no process reads the pipe. O_NOFOLLOW, and the check below: the path comes from
        # an untrusted process and may name any file.
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return f"{pipe}: {error.strerror}"
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return f"{pipe}: is not a pipe"
        os.write(fd, b"1\n")
    except OSError as error:
        return f"{pipe}: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def file_state(path: Path) -> tuple[int, int]:
    """Return (modification time, size) of a file; zeros if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _ends_as_pickle(path: Path) -> bool:
    try:
        with open(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8))
            return _PICKLE_END.search(file.read()) is not None
    except OSError:
        return False
