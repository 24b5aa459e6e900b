"""Callbacks on the futures of collectives, which gloo's threads call once a collective is done.

    callbacks = DoneCallbacks()
    callbacks.add(future, completed)
    callbacks.keep(plain)            # before the group goes
    callbacks.release()              # at any later time
    callbacks.wait()                 # before the interpreter ends

A callback needs the GIL. DDP's reducer may hold the last reference to a group, and frees it with the GIL held: the
group then joins gloo's threads. If one of them waits for the GIL to call back, a training that has succeeded hangs at
its end. So such a group is kept: Python frees torch's groups without the GIL.

A thread that asks for the GIL while the interpreter ends is ended by Python, and pybind11 then aborts the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import ref

__all__ = ["DoneCallbacks"]

_DONE_S = 10.0
"""Longest wait for the callback of a collective that is done: the thread needs only a core and the GIL."""
_IN_FLIGHT_S = 1.0
"""Longest wait for a collective in flight: its peers may be gone."""


class DoneCallbacks:
    """The callbacks that gloo's threads still hold, and the groups that are kept for them."""

    def __init__(self) -> None:
        self._futures: dict[ref[Any], Any] = {}  # by callback
        self._groups: list[Any] = []

    def add(self, future: Any, callback: Callable[[Any], None]) -> None:
        """Call `callback` with `future` when it is done. Pass a new function each time: the callback is over once torch
        has freed it, for which torch needs the GIL again."""
        self._futures[ref(callback, self._freed)] = future
        future.add_done_callback(callback)

    def keep(self, group: Any) -> None:
        """Keep torch's `group` alive if callbacks are still to come."""
        self.release()
        if self._futures:
            self._groups.append(group)

    def release(self) -> None:
        """Free the groups that were kept, if no callback is to come."""
        if not self._futures:
            self._groups.clear()

    def wait(self) -> None:
        """Wait until gloo's threads have dropped the callbacks, not longer than the limits above."""
        began_s = time.monotonic()
        while self._futures and time.monotonic() - began_s < (_DONE_S if self._has_done() else _IN_FLIGHT_S):
            time.sleep(0.001)

    def _has_done(self) -> bool:
        return any(future.done() for future in list(self._futures.values()))

    def _freed(self, callback: ref[Any]) -> None:
        self._futures.pop(callback, None)
