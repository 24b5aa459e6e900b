"""Thresholds of pipelines. Source of all numbers: measured on drills and the simulator
(`benchmarks.accuracy.bubble`)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelinePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicy:
    """When a stage is too heavy, and how much of a run is read."""

    excess_ratio: float = 1.15
    """Work / median of the other stages: less than one layer more in ten comes from uneven division."""
