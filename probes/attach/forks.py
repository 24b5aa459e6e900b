"""Call a method in each forked child, where the copy of a recorder must not write to its parent's tapes.

in_forks(attached.stop)        # no effect once the object is deleted
"""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod

__all__ = ["in_forks"]


def in_forks(method: Callable[[], object]) -> None:
    """Call a bound method right after each fork, in the new process."""
    reference = WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    os.register_at_fork(after_in_child=call)
