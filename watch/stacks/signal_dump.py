"""Python stacks of all ranks of a node by signal, also of ranks that are blocked inside a collective.

Every rank registers `faulthandler` on two signals with its own file (`probes.tape.stack_file`); watch sends
one and waits until the files have grown and grow no more (`take_stacks`): a rank that is killed next would leave half a
stack. A stopped process answers when it is continued or not at all, so the wait has a deadline.
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
"""A file of the same size after so long is complete: a stack is written line by line, in one go."""


def take_stacks(run: RunDir, attempt: int, pids: Mapping[int, int], *, all_threads: bool = False) -> list[int]:
    """Signal {rank: pid} to write their stacks; returns the ranks that answered within a second.

    `all_threads`: not only the main one; for processes that are ended next, since it may end them.
    """
    number = ALL_THREADS_SIGNAL if all_threads else MAIN_THREAD_SIGNAL
    before = {}
    for rank, pid in pids.items():
        path = stack_path(run, attempt, rank)
        if not path.exists() or os_state(pid)[0] in ("", "Z", "X", "T", "t"):
            continue
        size = path.stat().st_size  # before the signal: the answer may be there at once
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
