"""Fail open: an error in a probe is counted, logged once per place, and never reaches the training loop.

    with failing_open("gradients"):
        ...                            # anything that raises here is counted under "gradients"

`RANKSCOPE_DISABLED=1` turns every probe off. Tests set `RANKSCOPE_FAIL_LOUD=1`, so that an error in a probe is raised.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import Counter
from contextlib import suppress
from types import TracebackType

__all__ = ["error_counts", "failing_open", "probes_disabled", "record_error"]

logger = logging.getLogger("rankscope.probes")

_DEVICE_ERROR = re.compile(
    r"(?:CUDA|HIP) error: (.*(?:device-side assert|illegal|misaligned|launch failure|launch timed out|\bECC\b).*)"
)
"""Errors after which CUDA refuses every further call of the process."""
DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
DEVICE = "device"
"""Name under which device errors of all probes are counted."""
error_counts: Counter[str] = Counter()
"""Number of swallowed errors by place; the recorder writes it into the rank's last event."""


def probes_disabled() -> bool:
    """Return True if RANKSCOPE_DISABLED is set."""
    return os.environ.get("RANKSCOPE_DISABLED", "") not in ("", "0")


def record_error(place: str, error: BaseException) -> None:
    """Count `error` under `place`; log it the first time, with its traceback unless it is a disk error.

    Once a kernel of the program has failed, every CUDA call reports that failure. It is logged in one line for all
    places, because a probe's traceback would only hide the program's own. Raises `error` under RANKSCOPE_FAIL_LOUD.
    """
    broken = _DEVICE_ERROR.match(str(error))
    place = DEVICE if broken else place
    error_counts[place] += 1
    if os.environ.get("RANKSCOPE_FAIL_LOUD", "") not in ("", "0"):
        raise error
    if error_counts[place] > 1:
        return
    if broken:
        logger.warning("the device of this process failed and is not measured from here on: %s", broken[1])
        return
    trace = None if isinstance(error, OSError) and error.errno in DISK_ERRNOS else error  # the message is sufficient
    with suppress(Exception):  # tracebacks are written by `print`, which programs replace on all ranks but the first
        logger.warning("probe %s failed and is counted from here on: %s", place, error, exc_info=trace)


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
