"""Threads of `watch` that query DuckDB, and how to exit while one still does.

with background_loop(self._run_until, name="ingest"):      # called with the event that ends it
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
"""Seconds that the end of the block waits for the current round."""
_made: WeakSet[threading.Thread] = WeakSet()


def new_thread(target: Callable[[], None], *, name: str) -> threading.Thread:
    """Make a daemon thread that `end_process` knows."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _made.add(thread)
    return thread


def end_process(code: int) -> NoReturn:
    """Exit, without the interpreter's clean-up where a thread still runs: up to Python 3.13 the clean-up ends such a
    thread when it returns from C, and DuckDB's C++ then aborts the process.
    """
    if any(thread.is_alive() for thread in _made):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def background_loop(run_until: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Run it in a daemon thread; at the end of the block set its event and wait."""
    stop = threading.Event()
    thread = new_thread(lambda: run_until(stop), name=name)
    try:  # a signal may come while it starts, too
        thread.start()
        yield
    finally:
        stop.set()
        with suppress(RuntimeError):  # it has not started
            thread.join(STOP_S)
