"""Fail open: an error in a probe is counted, logged once per kind, and never reaches the training loop.

    with failing_open("gradients"):
        ...                            # anything that raises here is counted under "gradients"

`RANKSCOPE_DISABLED=1` turns every probe off. Tests set `RANKSCOPE_FAIL_LOUD=1`, so that a probe that is broken fails
the test instead of being swallowed by it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator

__all__ = ["error_counts", "failing_open", "probes_disabled", "record_error"]

logger = logging.getLogger("rankscope.probes")

error_counts: Counter[str] = Counter()
"""Number of swallowed errors by place; the recorder writes it into the rank's last event."""


def probes_disabled() -> bool:
    """Return True if RANKSCOPE_DISABLED is set."""
    return os.environ.get("RANKSCOPE_DISABLED", "") not in ("", "0")


def record_error(place: str, error: BaseException) -> None:
    """Count `error` under `place`; log it with its traceback the first time. Raises it under RANKSCOPE_FAIL_LOUD."""
    error_counts[place] += 1
    if os.environ.get("RANKSCOPE_FAIL_LOUD", "") not in ("", "0"):
        raise error
    if error_counts[place] == 1:
        logger.warning("probe %s failed and is counted from here on: %s", place, error, exc_info=error)


@contextlib.contextmanager
def failing_open(place: str) -> Iterator[None]:
    """Swallow and count any `Exception` of the block. KeyboardInterrupt and SystemExit pass."""
    try:
        yield
    except Exception as error:  # the whole point: no probe may end a training run
        record_error(place, error)
