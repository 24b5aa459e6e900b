"""How the time after a signal, `recovery.grace_s` in total, is divided.

    rank_grace_s(20.0)       # 13: ranks end their step and save a checkpoint
    budget_s(20.0)           # 18: the ranks' records are read, and the launcher ends whatever is left

After the ranks' time, remaining ranks are killed, `watch` reads the last records, and the verdict is printed.
"""

from __future__ import annotations

__all__ = ["KILL_MARGIN_S", "RESERVE_S", "budget_s", "rank_grace_s"]

RESERVE_S = 5.0
"""Seconds for the work after the ranks have ended, which takes 1 to 4 s on two busy cores."""
END_S = 2.0
"""Seconds left for the launcher's process to end."""
KILL_MARGIN_S = 1.0
"""Remaining ranks are killed this number of seconds after the end of their time. Ranks normally exit by themselves."""


def rank_grace_s(grace_s: float) -> float:
    """Seconds after the signal within which ranks must finish their step and save a checkpoint."""
    return max(grace_s - RESERVE_S - END_S, grace_s / 2)


def budget_s(grace_s: float) -> float:
    """Seconds after the signal at which the launcher ends whatever is left."""
    return rank_grace_s(grace_s) + RESERVE_S
