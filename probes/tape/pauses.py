"""Waits that do not count time in which this process was suspended: a SIGSTOP, a virtual machine that stood still.

paused_s = rest(1.0)      # 0.0, or how much longer than planned it took, if that was a pause
rest_while_running(13.0)
"""

from __future__ import annotations

import time

__all__ = ["PAUSE_S", "paused_since", "rest", "rest_while_running"]

PAUSE_S = 1.0
"""Seconds after which a rest that lasts longer than planned is a pause of this process: a SIGSTOP, a suspended machine.
"""


def rest(seconds: float) -> float:
    """Sleep. Returns the seconds by which that took longer because of a pause."""
    begin_s = time.monotonic()
    time.sleep(seconds)
    return paused_since(begin_s, seconds)


def paused_since(begin_s: float, planned_s: float) -> float:
    """Seconds by which a rest of `planned_s` that began then took longer because of a pause, else 0."""
    late_s = time.monotonic() - begin_s - planned_s
    return late_s if late_s > PAUSE_S else 0.0


def rest_while_running(seconds: float) -> None:
    """Sleep for so many seconds in which this process runs."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        end_s += rest(min(left_s, PAUSE_S))
