"""Name of the signal that ended a process: `signal_name(-9)` is "SIGKILL", and "" after a normal exit."""

from __future__ import annotations

import signal

__all__ = ["signal_name"]


def signal_name(exit_code: int) -> str:
    """Name by the exit code that `subprocess` gives; a real-time signal is counted from the first.

    "" too for what is the number of no signal.
    """
    number = -exit_code
    known = {int(one): one.name for one in signal.Signals}
    if not 0 < number <= signal.SIGRTMAX:
        return ""
    beyond = number - signal.SIGRTMIN
    # Between the two kinds are those that the C library keeps for itself.
    return known.get(number) or (f"SIGRTMIN+{beyond}" if beyond > 0 else f"signal {number}")
