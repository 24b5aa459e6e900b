"""Callbacks on the futures of collectives, which gloo's threads call once a collective is done.

    callbacks = DoneCallbacks()
    callbacks.add(future, completed)
    callbacks.keep(plain)            # before the group goes
    callbacks.release()              # at any later time

A callback needs the GIL. DDP's reducer may hold the last reference to a group, and frees it with the GIL held: the
group then joins gloo's threads. If one of them waits for the GIL to call back, a training that has succeeded hangs at
its end. So such a group is kept: Python frees torch's groups without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

__all__ = ["DoneCallbacks"]


class DoneCallbacks:
    """The callbacks that gloo's threads still hold, and the groups that are kept for them."""

    def __init__(self) -> None:
        self._held: set[ref[Any]] = set()
        self._groups: list[Any] = []

    def add(self, future: Any, callback: Callable[[Any], None]) -> None:
        """Call `callback` with `future` when it is done. Each needs a function of its own: torch frees it afterwards,
        again with the GIL."""
        self._held.add(ref(callback, self._held.discard))
        future.add_done_callback(callback)

    def keep(self, group: Any) -> None:
        """Keep torch's `group` alive if callbacks are still to come."""
        self.release()
        if self._held:
            self._groups.append(group)

    def release(self) -> None:
        """Free the groups that were kept, if no callback is to come."""
        if not self._held:
            self._groups.clear()
