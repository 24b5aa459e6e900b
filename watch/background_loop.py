"""A loop of `watch` in its own thread while a block runs.

with background_loop(self._run_until, name="ingest"):      # called with the event that ends it
    ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["background_loop"]

STOP_S = 20.0
"""Seconds that the end of the block waits for the current round."""


@contextmanager
def background_loop(run_until: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Run it in a daemon thread; at the end of the block set its event and wait."""
    stop = threading.Event()
    thread = threading.Thread(target=run_until, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_S)
