"""Python stacks of all ranks of a node, also of ranks that are blocked inside a collective.

Every rank registers `faulthandler` on SIGUSR2 with a file of its own (`register`, called by the worker); watch sends
the signal and waits until the files have grown (`take_stacks`). A stopped process answers when it is continued or not
at all, so the wait has a deadline.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from pathlib import Path

from probes.rundir import RunDir
from trainer.recovery.processes import kill, os_state

__all__ = ["register", "stack_path", "take_stacks"]

STACK_SIGNAL = signal.SIGUSR2
WAIT_S = 1.0


def stack_path(run: RunDir, attempt: int, rank: int) -> Path:
    """The file that a rank's stacks are appended to."""
    return run.stacks / f"attempt-{attempt}-rank-{rank:05d}.txt"


def register(run: RunDir, attempt: int, rank: int) -> None:
    """Let this process write its stacks when watch asks. The file stays open for the life of the process."""
    run.stacks.mkdir(exist_ok=True)
    file = stack_path(run, attempt, rank).open("a")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable(file=file, all_threads=True)


def take_stacks(run: RunDir, attempt: int, pids: dict[int, int]) -> list[int]:
    """Ask {rank: pid} for their stacks; returns the ranks that answered within a second."""
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
