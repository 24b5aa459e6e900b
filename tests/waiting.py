"""Waiting for something to become true, with a deadline and never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    """Wait until `condition` is true and return its value; AssertionError at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} in {deadline_s} s"
        time.sleep(0.02)
    return value
