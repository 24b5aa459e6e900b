"""Fail open: an error in a probe is counted, logged once per kind, and never reaches the training loop.

    with failing_open("gradients"):
        ...                            # anything that raises here is counted under "gradients"

`RANKSCOPE_DISABLED=1` turns every probe off. Tests set `RANKSCOPE_FAIL_LOUD=1`, so that a probe that is broken fails
the test instead of being swallowed by it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from types import TracebackType

__all__ = ["error_counts", "failing_open", "probes_disabled", "record_error"]

logger = logging.getLogger("rankscope.probes")

DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
error_counts: Counter[str] = Counter()
"""Number of swallowed errors by place; the recorder writes it into the rank's last event."""


def probes_disabled() -> bool:
    """Return True if RANKSCOPE_DISABLED is set."""
    return os.environ.get("RANKSCOPE_DISABLED", "") not in ("", "0")


def record_error(place: str, error: BaseException) -> None:
    """Count `error` under `place`; log it the first time, with its traceback unless a disk refused.

    Raises it under RANKSCOPE_FAIL_LOUD.
    """
    error_counts[place] += 1
    if os.environ.get("RANKSCOPE_FAIL_LOUD", "") not in ("", "0"):
        raise error
    if error_counts[place] == 1:
        is_disk = isinstance(error, OSError) and error.errno in DISK_ERRNOS  # the message says it all
        shown = None if is_disk else error
        logger.warning("probe %s failed and is counted from here on: %s", place, error, exc_info=shown)


class failing_open:
    """Swallow and count any `Exception` of the block. KeyboardInterrupt and SystemExit pass. It is a class because
    every step enters several, and a generator-based context manager takes three times as long.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        record_error(self._place, error)
        return True  # the whole point: no probe may end a training run
