"""Python stacks of all ranks of a node by signal, also of ranks that are blocked inside a collective.

Every rank registers `faulthandler` on SIGUSR2 with a file of its own (`probes.tape.stack_file`); watch sends
the signal and waits until the files have grown (`take_stacks`). A stopped process answers when it is continued or not
at all, so the wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from probes.tape.rundir import RunDir
from probes.tape.stack_file import STACK_SIGNAL, stack_path
from watch.processes import kill, os_state

__all__ = ["take_stacks"]

WAIT_S = 1.0


def take_stacks(run: RunDir, attempt: int, pids: Mapping[int, int]) -> list[int]:
    """Signal {rank: pid} to write their stacks; returns the ranks that answered within a second."""
    before = {}
    for rank, pid in pids.items():
        path = stack_path(run, attempt, rank)
        if path.exists() and os_state(pid)[0] not in ("", "Z", "X", "T", "t") and kill(pid, STACK_SIGNAL):
            before[rank] = path.stat().st_size
    deadline = time.monotonic() + WAIT_S
    answered: set[int] = set()
    while len(answered) < len(before) and time.monotonic() < deadline:
        answered = {rank for rank, size in before.items() if stack_path(run, attempt, rank).stat().st_size > size}
        time.sleep(0.02)
    return sorted(answered)
