"""File to which a rank writes its Python stacks when `watch` requests them, also while blocked in a collective.

release = register(run, attempt, rank)
...
release()                                  # the signal and faulthandler are again what they were
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from pathlib import Path

from .rundir import RunDir

__all__ = ["STACK_SIGNAL", "register", "stack_path"]

STACK_SIGNAL = signal.SIGUSR2


def stack_path(run: RunDir, attempt: int, rank: int) -> Path:
    """The file that a rank's stacks are appended to. Who has none is not asked: the signal would end it."""
    return run.stacks / f"attempt-{attempt}-rank-{rank:05d}.txt"


def register(run: RunDir, attempt: int, rank: int) -> Callable[[], None]:
    """Let this process write its stacks when watch asks; returns what undoes it.

    A handler of the user's own for the signal is left alone, and so is a `faulthandler` that he has turned on.
    """
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return lambda: None
    run.stacks.mkdir(exist_ok=True)
    path = stack_path(run, attempt, rank)
    file = path.open("a")  # open for the life of the process
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    enabled = not faulthandler.is_enabled()
    if enabled:
        faulthandler.enable(file=file, all_threads=True)

    def release() -> None:
        path.rename(path.with_suffix(".ended"))  # first: from here on nobody sends the signal
        if enabled:
            faulthandler.disable()
        faulthandler.unregister(STACK_SIGNAL)
        file.close()

    return release
