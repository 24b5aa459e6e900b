"""Thresholds of comparisons between runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ScalingPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """When runs of different sizes are a scaling series."""

    same_ratio: float = 0.01
    """Difference of work up to which it counts as equal (ratio). Source: convention; batches are rounded to ranks."""
