"""Name of the signal that ended a process: `signal_name(-9)` is "SIGKILL", and "" after a normal exit."""

from __future__ import annotations

import signal

__all__ = ["signal_name"]


def signal_name(exit_code: int) -> str:
    """Signal name for a negative exit code, as `subprocess` gives it; real-time signals are counted from SIGRTMIN.

    Returns "" for a number outside of the range of signals.
    """
    number = -exit_code
    known = {int(one): one.name for one in signal.Signals}
    if not 0 < number <= signal.SIGRTMAX:
        return ""
    beyond = number - signal.SIGRTMIN
    # The C library reserves the numbers between the standard and the real-time signals.
    return known.get(number) or (f"SIGRTMIN+{beyond}" if beyond > 0 else f"signal {number}")
