"""Exit when the launcher dies, even by SIGKILL.

    end_with_launcher()          # first thing in a rank: reads RANKSCOPE_LAUNCHER_PID

The kernel sends SIGTERM once the parent has died (PR_SET_PDEATHSIG): the rank finishes its step and saves, as in a
preemption. With several nodes the signal is SIGKILL: the other nodes then lose this node and restart without it. After
SIGTERM all ranks of the job would agree to stop. A rank keeps running if its parent is not the launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

__all__ = ["VARIABLE", "end_with_launcher", "signal_at_parent_death"]

VARIABLE = "RANKSCOPE_LAUNCHER_PID"
"""Set by our launcher in the environment of its ranks."""
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
ADOPTION_S = 5.0
"""Maximum seconds until the process between the zygote and the rank ends and the launcher becomes the rank's parent."""


def end_with_launcher() -> int:
    """Make the kernel end this process when its launcher dies. Returns the launcher's pid, or 0 for another launcher.
    Call it in the main thread.
    """
    text = os.environ.pop(VARIABLE, "")  # processes that the rank starts must not inherit this setting
    if not text.isdecimal():
        return 0
    launcher, first_parent = int(text), os.getppid()
    deadline = time.monotonic() + ADOPTION_S
    # The kernel watches the process that is the parent at the time of the call. So wait until that is the launcher.
    while os.getppid() == first_parent != launcher and _is_alive(launcher) and time.monotonic() < deadline:
        time.sleep(0.002)
    one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    number = signal.SIGTERM if one_node else signal.SIGKILL
    if os.getppid() == launcher:
        signal_at_parent_death(number)
    if os.getppid() != launcher and not _is_alive(launcher):  # the launcher died before the call took effect
        os.kill(os.getpid(), number)
    return launcher


def signal_at_parent_death(number: signal.Signals) -> None:
    """Make the kernel send this signal when the parent dies; kept across `exec`, but not inherited by children."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(number), 0, 0, 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
