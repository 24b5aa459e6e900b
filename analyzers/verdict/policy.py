"""Thresholds of what may be said of a run as a whole."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VerdictPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPolicy:
    """When a run without findings is said to have no problems. Source: convention."""

    max_unjudged_ratio: float = 0.10
    """Share of the steps' time that may be unmeasured, or measured and not compared."""
    min_gain_ratio: float = 0.01
    """Gain of balanced ranks, part of a balanced step, from which a finding must explain it, if it exceeds the error of
    the replay."""
