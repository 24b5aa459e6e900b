"""Thresholds of checkpoints, and the failure rate that is assumed without failures."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.policy import SHARED

__all__ = ["CheckpointPolicy", "FailurePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When saves are reported."""

    age_factor: float = 3.0
    """Steps since the last good save over the steps between saves (ratio). Source: convention; two may be missed."""
    min_age_steps: int = 20
    """Age (steps) below which a save is never old. Source: convention."""
    delayed_ratio: float = 0.2
    """Share of saves that began late because the one before was still being written. Source: convention."""
    min_delayed: int = 2
    """Delayed saves (count) for that. Source: convention; one may be a slow moment of the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Failure rate of a run that has had no failure, and from how many on its own rate counts."""

    device_mtbf_s: float = 50_700 * 3600.0
    """Mean time between failures of one device (seconds). Source: Llama 3 405B, 419 unexpected interruptions in 54
    days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4): 54 * 24 * 16384 / 419 = 50,700 hours a GPU."""

    def knows_rate(self, num_failures: int) -> bool:
        """Return True unless the rate is that of a failure or two; without any it is the assumed one."""
        return not 0 < num_failures < SHARED.min_times
