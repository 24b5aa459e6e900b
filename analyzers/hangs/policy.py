"""Thresholds of ranks out of sync, and of the evidence that devices and hosts add to a hang.

Limits of silence: `analyzers.run.policy`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DesyncPolicy", "DeviceEvidencePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvidencePolicy:
    """Selection of the health readings that belong to a hang."""

    before_s: float = 60.0
    """Readings and XIDs count from so long (seconds) before the last record. Source: convention; what breaks a rank
    comes shortly before its silence."""
    mute_s: float = 10.0
    """Seconds without a reading of a GPU whose host is still read, from which it does not answer. Source: convention;
    all GPUs of a node are read once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesyncPolicy:
    """Steps that show that a rank's collectives were in sync with the others', and are no longer."""

    recent_steps: int = 100
    """Newest steps in which a group must still be out of sync. Source: technical; a skipped call is never caught up."""
