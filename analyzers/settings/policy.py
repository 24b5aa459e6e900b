"""Thresholds of advice on settings and of a slow start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConfigurationPolicy", "LiveAdvicePolicy", "PlanPolicy", "StartupPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPolicy:
    """When a setting is advised against."""

    max_buckets: int = 100
    """Largest number of gradient buckets in a backward pass (count). Source: convention; DDP's default of 25 MiB gives
    20 for a model of 124 million parameters."""
    one_bucket_bytes: int = 64 << 20
    """Size of the gradients (bytes) at which a single bucket hides too little. Source: convention."""
    microbatches_per_stage: float = 2.0
    """Minimum number of microbatches per stage (ratio). Source: 1f1b's idle share, which is above a third below
    this."""
    tokens_per_rank: int = 2048
    """Tokens per step and GPU below which kernels are too short to fill it (count). Source: convention."""
    compression_error: float = 0.7
    """Largest relative error of compressed gradients (ratio). Source: sine of 45 degrees; with a larger error the step
    points in another direction.
    """
    utilisation_ratio: float = 0.9
    """GPU utilisation (ratio, median over samples and devices) below which advice is given. Source: convention; the
    counter includes every kernel, so a device below it is certainly idle, and one above it may be idle as well."""
    min_samples: int = 60
    """Minimum number of samples of a device's utilisation (count): a minute. Source: convention."""
    min_run_s: float = 600.0
    """Length (seconds) at which a run without any checkpoint is reported. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupPolicy:
    """When a start is slow."""

    slow_s: float = 20.0
    """Shortest part of a start that is slow (seconds). Source: convention; torch alone takes a few seconds to import
    from a disk."""
    rank_s: float = 5.0
    """Smallest difference between ranks at which one is named (seconds). Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPolicy:
    """When a plan counts as right."""

    launches_of_block_s: float = 0.5e-3
    """Shortest time (seconds) in which a host launches a block's kernels, forward and backward. Source: measured on the
    recorded runs of a GPU; 50 launches per block and step, 10 us each at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAdvicePolicy:
    """When advice is sought while the run trains."""

    at_steps: tuple[int, ...] = (20, 80, 320, 1280)
    """Numbers of finished steps of an attempt at which advice is sought (count). Source: convention; the analyses need
    at least 20 steps, and some costs show only after a minute or a checkpoint. A change after the last of these steps
    is a finding, not advice.
    """
