"""Policy of what a capture of torch's profiler says of a slow rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProfilePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePolicy:
    """Thresholds of the comparison of a suspect with its peer."""

    min_excess_ratio: float = 0.02
    """Share of the suspect's profiled step from which an operator's excess is named. Source: convention; below it are
    differences of single steps."""
