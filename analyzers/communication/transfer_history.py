"""Transfers of one group that became slower than they were: for a group that has nothing beside it to compare with.

    found = find_slower(transfers_ms, HistoryPolicy())       # one median a window of steps
    found.begin, found.factor, found.before_ms

All windows from an onset to the newest must be slow, by a factor and by what the windows before ever showed. Which of
the members' links it is, durations alone do not tell: all members wait for the slowest link of a ring. And a machine
without free cores makes every transfer slow: `core_wait_rise` says by how much the ranks waited longer for a core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analyzers.robust import sigma
from analyzers.source import Floats, Source, floats, ints

__all__ = ["HistoryPolicy", "Slower", "core_wait", "core_wait_rise", "find_slower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPolicy:
    """Thresholds of a change."""

    min_factor: float = 2.0
    """Transfers since the onset over those before it: there is no other group to confirm it."""
    min_windows: int = 3
    """Slow windows: the newest may hold a single step, and a machine's burst of six steps was told as a slow link."""
    min_windows_before: int = 3
    """Windows before the onset."""
    min_sigmas: float = 6.0
    """Change of the logarithm over its noise from window to window."""
    precedent_factor: float = 1.3
    """Median since the onset over the slowest window before it."""
    agreement_ratio: float = 0.8
    """Share of windows since the onset that are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower:
    """Windows from `begin` on are slow."""

    begin: int
    factor: float
    before_ms: float
    after_ms: float


def find_slower(transfers_ms: Floats, policy: HistoryPolicy | None = None) -> Slower | None:
    """The change of one row of windows that lasts to the newest; None if there is none. Pure."""
    policy = policy or HistoryPolicy()
    total = len(transfers_ms)
    logs = np.log(np.maximum(transfers_ms, 1e-6))
    best: tuple[float, int] | None = None
    for begin in range(policy.min_windows_before, total - policy.min_windows + 1):
        rise = float(logs[begin:].mean() - logs[:begin].mean())
        # The likelihood of a change: its size, and how many windows are on both sides of it.
        gain = rise * math.sqrt(begin * (total - begin) / total)
        if best is None or gain > best[0]:
            best = (gain, begin)
    if best is None:
        return None
    begin = best[1]
    before, after = transfers_ms[:begin], transfers_ms[begin:]
    middle, now = float(np.median(before)), float(np.median(after))
    factor = now / max(middle, 1e-6)
    steps = np.concatenate([np.diff(logs[:begin]), np.diff(logs[begin:])])
    noise = sigma(steps, center=0.0) / math.sqrt(2)
    slow = float(np.mean(after >= (1 + policy.min_factor) / 2 * middle))
    if factor < policy.min_factor or slow < policy.agreement_ratio or math.log(factor) < policy.min_sigmas * noise:
        return None
    if now < policy.precedent_factor * float(before.max()):
        return None
    return Slower(begin=begin, factor=factor, before_ms=middle, after_ms=now)


def core_wait(source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int) -> float | None:
    """Milliseconds a step that the ranks waited for a core in these steps; None if not recorded."""
    if not ranks:
        return None
    ((waited,),) = source.rows(
        "SELECT median(run_delay_ns) / 1e6 FROM steps WHERE attempt = ? AND step BETWEEN ? AND ? "
        f"AND run_delay_ns IS NOT NULL AND rank IN ({', '.join(map(str, ranks))})",
        [attempt, first_step, last_step],
    )
    return None if waited is None else float(waited)


def core_wait_rise(source: Source, attempt: int, ranks: Sequence[int], onset: int, since_step: int) -> float | None:
    """By how many milliseconds a step the ranks waited longer for a core since the onset; None if not recorded."""
    if not ranks:
        return None
    table = source.query(
        f"""
        SELECT step, median(run_delay_ns) / 1e6 AS waited FROM steps
        WHERE attempt = ? AND step >= ? AND run_delay_ns IS NOT NULL AND rank IN ({", ".join(map(str, ranks))})
        GROUP BY step ORDER BY step
        """,
        [attempt, since_step],
    )
    step, waited = ints(table["step"]), floats(table["waited"])
    before, after = waited[step < onset], waited[step >= onset]
    if not len(before) or not len(after):
        return None
    return float(np.median(after) - np.median(before))
