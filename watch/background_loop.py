"""Threads of `watch` that query DuckDB, and a safe exit while one is still running.

with background_loop(self._run_until, name="ingest"):      # the function gets the event that stops it
    ...
end_process(code)
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn
from weakref import WeakSet

__all__ = ["background_loop", "end_process", "new_thread"]

STOP_S = 20.0
"""Seconds to wait for the current round at the end of the block."""
_made: WeakSet[threading.Thread] = WeakSet()


def new_thread(target: Callable[[], None], *, name: str) -> threading.Thread:
    """Create a daemon thread that `end_process` knows about."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _made.add(thread)
    return thread


def end_process(code: int) -> NoReturn:
    """Exit the process. While a thread of this module runs, skip the interpreter's clean-up: up to Python 3.13 it
    terminates the thread on return from C, and DuckDB's C++ code then aborts the process.
    """
    if any(thread.is_alive() for thread in _made):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def background_loop(run_until: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Run a function in a daemon thread; at the end of the block, set its event and wait for it."""
    stop = threading.Event()
    thread = new_thread(lambda: run_until(stop), name=name)
    try:  # inside `try`, because a signal may arrive while the thread starts
        thread.start()
        yield
    finally:
        stop.set()
        with suppress(RuntimeError):  # `join` raises this if the thread was not started
            thread.join(STOP_S)
