"""Take Python stacks of a node's ranks by a signal, even of ranks blocked in a collective.

Every rank registers `faulthandler` for two signals, with a separate file (`probes.tape.stack_file`). Watch sends a
signal and waits until the files have grown and stop growing (`take_stacks`), because killing a rank earlier would
truncate its stack. A stopped process may never answer, so the wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from probes.tape.rundir import RunDir
from probes.tape.stack_file import ALL_THREADS_SIGNAL, MAIN_THREAD_SIGNAL, stack_path
from watch.processes import kill, os_state

__all__ = ["take_stacks"]

WAIT_S = 1.0
POLL_S = 0.02
"""Seconds of unchanged size after which a file is complete: `faulthandler` writes without pausing."""


def take_stacks(run: RunDir, attempt: int, pids: Mapping[int, int], *, all_threads: bool = False) -> list[int]:
    """Signal the processes ({rank: pid}) to write their stacks. Returns the ranks that answered within a second.

    `all_threads`: dump all threads, which may crash the process, so use it only for processes about to be killed.
    """
    number = ALL_THREADS_SIGNAL if all_threads else MAIN_THREAD_SIGNAL
    before = {}
    for rank, pid in pids.items():
        path = stack_path(run, attempt, rank)
        if not path.exists() or os_state(pid)[0] in ("", "Z", "X", "T", "t"):
            continue
        size = path.stat().st_size  # before the signal, because the answer may come at once
        if kill(pid, number):
            before[rank] = size
    deadline = time.monotonic() + WAIT_S
    sizes, answered, are_settled = before, set[int](), not before
    while not are_settled and time.monotonic() < deadline:
        time.sleep(POLL_S)
        earlier, sizes = sizes, {rank: stack_path(run, attempt, rank).stat().st_size for rank in before}
        answered = {rank for rank, size in sizes.items() if size > before[rank]}
        are_settled = len(answered) == len(before) and sizes == earlier
    return sorted(answered)
