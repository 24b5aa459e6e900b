"""Thresholds of pipelines. Source of all numbers: measured on drills and the simulator
(`benchmarks.accuracy.bubble`)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelinePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicy:
    """When a stage is too heavy, and how much of a run is read."""

    excess_ratio: float = 1.15
    """Minimum work of a heavy stage / median of the other stages (ratio). A smaller excess may come from uneven
    division: one layer more than the ten or more of the other stages."""
