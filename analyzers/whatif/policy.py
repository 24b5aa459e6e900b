"""Thresholds of what-if analyses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WhatIfPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPolicy:
    """Steps that a graph takes, when it is trusted, and which ranks count as the worst."""

    warm_up_steps: int = 5
    """First steps of an attempt (count), which allocate and connect. Source: convention."""
    min_steps: int = 3
    """Whole neighbouring steps that a graph needs (count). Source: convention; the first one only starts the others."""
    max_error_ratio: float = 0.1
    """Difference between replay and measurement up to which a graph of calls is used (ratio). Source: convention;
    with a larger one the steps alone are taken."""
    max_delay_ratio: float = 0.1
    """Launch delay, part of a step, above which no gain is claimed (ratio). Source: convention, that of the verdict on
    unmeasured time."""
    sure_errors: float = 3.0
    """Standard errors of a rank's mean excess that are no lasting difference (count). Source: convention."""
    block_steps: int = 5
    """Neighbouring steps whose mean is one observation of that: their noise is not independent (count)."""
    worst_share_ratio: float = 0.03
    """Share of the ranks that are balanced for M_W. Source: Lin et al., OSDI 2025."""
    min_slowdown_ratio: float = 1.005
    """Slowdown from which shares of it are given (ratio). Source: convention; below, they are noise."""
