"""File to which a rank writes its Python stacks when `watch` requests them, also while blocked in a collective.

release = register(run, attempt, rank)
...
release()                  # restores the handlers, except that late requests are ignored
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

from .files.checked_descriptor import moved_up
from .rundir import RunDir

__all__ = ["ALL_THREADS_SIGNAL", "MAIN_THREAD_SIGNAL", "register", "stack_path"]

ALL_THREADS_SIGNAL: int = signal.SIGUSR2
"""Only for a process that will be killed next: `faulthandler` walks the frames of threads while they run, and a frame
freed meanwhile crashes the process with SIGSEGV."""
MAIN_THREAD_SIGNAL: int = signal.SIGRTMIN + 9
"""Safe in a healthy process: only the frames of the interrupted thread are walked."""


def stack_path(run: RunDir, attempt: int, rank: int) -> Path:
    """The file to which a rank's stacks are appended. Processes without this file get no signal, because the signal
    would end them."""
    return run.stacks / f"attempt-{attempt}-rank-{rank:05d}.txt"


def register(run: RunDir, attempt: int, rank: int) -> Callable[[], None]:
    """Let this process write its stacks when `watch` asks for them. Returns a function that undoes this.

    A user's handler for one of the signals, or a `faulthandler` that the user has enabled, is left alone.
    """
    is_free = signal.getsignal(MAIN_THREAD_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    if not is_free or signal.getsignal(ALL_THREADS_SIGNAL) is not signal.SIG_DFL:
        return lambda: None
    with contextlib.suppress(ValueError):  # not the main thread
        # `faulthandler` restores this handler when it is released and at the interpreter's end. With the default
        # handler a late request of `watch` would then end a healthy rank.
        signal.signal(MAIN_THREAD_SIGNAL, signal.SIG_IGN)
    run.stacks.mkdir(exist_ok=True)
    path = stack_path(run, attempt, rank)
    file = open(moved_up(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)), "a")  # noqa: SIM115
    faulthandler.register(ALL_THREADS_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.register(MAIN_THREAD_SIGNAL, file=file, all_threads=False, chain=False)
    enabled = not faulthandler.is_enabled()
    if enabled:
        faulthandler.enable(file=file, all_threads=True)

    def release() -> None:
        # before the handlers are removed: without the file the signal is no longer sent
        path.rename(path.with_suffix(".ended"))
        if enabled:
            faulthandler.disable()
        # Unregistering restores the handler before ours, also over a handler that the script has set since then.
        for number, before in ((ALL_THREADS_SIGNAL, signal.SIG_DFL), (MAIN_THREAD_SIGNAL, signal.SIG_IGN)):
            if signal.getsignal(number) in (before, signal.SIG_DFL):
                faulthandler.unregister(number)
        with contextlib.suppress(OSError):  # the script has closed the file
            file.close()

    return release
