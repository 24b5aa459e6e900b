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
    bubble_ratio: float = 0.2
    """Share of the run beyond what the schedule makes idle from which an alert is information. Source: convention."""
    bubble_alert_ratio: float = 0.3
    """The same share from which it is a warning. Source: convention."""
    min_lighten_ratio: float = 0.02
    """Work of the heaviest stage over the mean that is worth moving; a layer is seldom less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineJobPolicy:
    """When a slowdown is reported, and what it is put down to."""

    min_slowdown_ratio: float = 1.1
    """S from which a job counts as straggling. Source: Lin et al., OSDI 2025."""
    min_share_ratio: float = 0.5
    """M_W and M_S from which the slowdown is put down to the worst workers or the last stage. Source: Lin et al., OSDI
    2025."""
