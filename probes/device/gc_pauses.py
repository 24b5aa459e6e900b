"""Time in Python's garbage collector, without losing a signal that arrives while it collects."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Generator


class GcPauses:
    """Adds up the collections of this process until it is closed.

    The collector prints and drops exceptions of its callbacks. A signal handler that raises, such as Ctrl-C's, may run
    at the first instruction of any Python function, before its `try`. So the callback is a generator that is suspended
    inside its `try`, and is called only through C functions.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self.raised: BaseException | None = None
        """Exception that a signal handler raised during a collection."""
        add = self._add_pauses()
        next(add)
        # The collector calls the callback with two arguments. `max`, with `send` as its key function, passes each of
        # them to the generator, without a Python function in between.
        self._callback = functools.partial(max, key=add.send)
        gc.callbacks.append(self._callback)

    def close(self) -> None:
        """Stop counting."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._callback)

    def raise_again(self) -> None:
        """Raise here an exception that a signal handler raised during a collection."""
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised

    def _add_pauses(self) -> Generator[int, object, None]:
        start_ns = 0
        while True:
            try:
                while True:
                    sent = yield 0  # the collector sends "start" or "stop", and then a dictionary with details
                    if sent == "start":
                        start_ns = time.monotonic_ns()
                    elif sent == "stop":
                        self.total_ns += time.monotonic_ns() - start_ns
            except GeneratorExit:
                return
            except BaseException as error:
                self.raised = error
