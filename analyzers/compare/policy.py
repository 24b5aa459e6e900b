"""Thresholds of comparisons between runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ComparePolicy", "ScalingPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePolicy:
    """When two runs differ."""

    loss_sigmas: float = 4.0
    """Difference of two losses / its standard error from which it is real (ratio). Source: convention; white noise
    passes once in some sixteen thousand comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """When runs of different sizes are a scaling series."""

    same_ratio: float = 0.01
    """Difference of work up to which it counts as equal (ratio). Source: convention; batches are rounded to ranks."""
