"""The failure rate assumed for a run without failures, and the age at which a save is too old."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.policy import SHARED

__all__ = ["FailurePolicy", "SaveAgePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAgePolicy:
    """When a run has gone too long without a save."""

    min_steps: int = 20
    """Smallest age in steps at which the last save can count as old, however short the interval (count). Source:
    convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Failure rate assumed for a run that has had no failure."""

    device_mtbf_s: float = 50_700 * 3600.0
    """Mean time between failures of one device (seconds). Source: Llama 3 405B, 419 unexpected interruptions in 54
    days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4): 54 * 24 * 16384 / 419 = 50,700 hours per GPU."""

    def knows_rate(self, num_failures: int) -> bool:
        """Return False after one or two failures, because they are too few for a rate. Without failures the assumed
        rate is used."""
        return not 0 < num_failures < SHARED.min_times
