"""Thresholds of waiting for data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DataPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """When a run waits too much for data. Sources: measured on drills and healthy runs
    (`benchmarks.accuracy.diagnosis`)."""

    share_ratio: float = 0.2
    """Smallest share of the time spent on data. A loader that keeps up takes well under a hundredth."""
    min_ms: float = 1.0
    """Smallest wait per step (ms). A smaller one may be a copy or the timer's resolution."""
    warm_up_steps: int = 5
    """Number of first steps that are not judged: workers start and files are first opened in them."""
    min_steps: int = 20
    """Minimum number of steps to recognise periodic waits."""
    block_steps: int = 10
    """Steps between the candidate onsets."""
    heavy_factor: float = 4.0
    """Wait relative to the median step's, at which a step counts as starved."""
