"""Thresholds of waiting for data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DataPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """When a run waits too much for data. Sources: measured on drills and healthy runs (`benchmarks.diagnosis`)."""

    share_ratio: float = 0.2
    """Share of the time spent on data. A loader that keeps up takes well under a hundredth."""
    onset_ratio: float = 0.1
    """Share from which a step lies behind the onset, and a rank is one of those that wait: half of `share_ratio`, so
    that steps that wait now and then do not end a stretch."""
    min_ms: float = 1.0
    """Least wait a step (ms): below, a copy and the timer's grain are measured."""
    warm_up_steps: int = 5
    """First steps, in which workers start and files are opened for the first time."""
    min_steps: int = 20
    """Steps from which a rhythm can be recognised."""
    block_steps: int = 10
    """Distance of the onsets that are tried."""
    steady_ratio: float = 0.6
    """Share of waiting steps from which the wait is steady."""
    heavy_factor: float = 4.0
    """Wait / that of the median step from which a step counts as starved."""
    regular_ratio: float = 0.7
    """Share of gaps that must be equal."""
    gap_tolerance_ratio: float = 0.1
    """Deviation of a gap from the median one up to which they are equal; one step at least."""
    stretch_steps: int = 2
    """Distance (steps) up to which starved steps are one stretch, which counts once."""
    epoch_steps: int = 20
    """Shortest gap that may be an epoch."""
    padded_ratio: float = 0.3
    """Share of padding among the tokens from which it is reported: batches of random lengths have 10 to 25 %."""
