"""Waiting for something to become true, with a deadline and never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Launched", "wait_for"]


LEAST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
PAUSE_RATIO = 9.0
"""Pause / time of a check: checks take a tenth of a core, or more if `LONGEST_PAUSE_S` cuts the pause."""


class Launched(Protocol):
    """Process that a condition depends on: once it has ended, the condition cannot become true any more."""

    def has_ended(self) -> bool: ...

    def logs(self) -> str: ...


def wait_for(condition: Callable[[], Any], what: str, run: Launched | None = None, deadline_s: float = 100.0) -> Any:
    """Wait until `condition` is true and return its value; AssertionError at the deadline or once `run` has ended."""
    deadline = time.monotonic() + deadline_s
    while True:
        # Read before the check: a condition that becomes true at the last moment counts, too.
        began, has_ended = time.monotonic(), run is not None and run.has_ended()
        if value := condition():
            return value
        took_s = time.monotonic() - began
        assert not has_ended, f"the run ended while waiting for {what}" + (f"\n{run.logs()}" if run else "")
        assert began < deadline, f"no {what} in {deadline_s} s" + (f"\n{run.logs()}" if run else "")
        # A slow condition is checked less often: the run that is waited for needs the core, too.
        time.sleep(min(max(LEAST_PAUSE_S, PAUSE_RATIO * took_s), LONGEST_PAUSE_S))
