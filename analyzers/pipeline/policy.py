"""Thresholds of pipelines. Source of all numbers: measured on drills and the simulator
(`benchmarks.accuracy.bubble`)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelineJobPolicy", "PipelinePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicy:
    """When a stage is too heavy, and how much of a run is read."""

    excess_ratio: float = 1.15
    """Work / median of the other stages: less than a layer more in ten is how layers divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineJobPolicy:
    """When a slowdown is reported, and what it is put down to."""

    min_slowdown_ratio: float = 1.1
    """S from which a job counts as straggling. Source: Lin et al., OSDI 2025."""
