"""Division of the time after a signal, all within `recovery.grace_s`.

    rank_grace_s(20.0)       # 13: ranks end their step and save a checkpoint
    budget_s(20.0)           # 18: their records are read, and the launcher ends whatever is left

After the ranks' time, remaining ranks are killed, `watch` reads the last records, and the verdict is printed.
"""

from __future__ import annotations

__all__ = ["KILL_MARGIN_S", "RESERVE_S", "budget_s", "rank_grace_s"]

RESERVE_S = 5.0
"""Time for the work after the ranks' end: 1 to 4 s on two busy cores."""
END_S = 2.0
"""Time left for the launcher's process to end."""
KILL_MARGIN_S = 1.0
"""Seconds after the end of their time at which remaining ranks are killed; ranks normally exit by themselves."""


def rank_grace_s(grace_s: float) -> float:
    """Time that ranks have for the end of the step and a checkpoint, seconds after the signal."""
    return max(grace_s - RESERVE_S - END_S, grace_s / 2)


def budget_s(grace_s: float) -> float:
    """Time until the launcher ends whatever is left, seconds after the signal."""
    return rank_grace_s(grace_s) + RESERVE_S
