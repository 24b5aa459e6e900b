"""Thresholds for ranks out of sync, and for the evidence that devices and hosts add to a hang.

Limits of silence: `analyzers.run.policy`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DesyncPolicy", "DeviceEvidencePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvidencePolicy:
    """Selection of the health readings that belong to a hang."""

    before_s: float = 60.0
    """Time (seconds) before the last record, or around a wait's start, in which readings, XIDs and network events
    count. Source: convention; the cause is recorded shortly before a rank's silence."""
    mute_s: float = 10.0
    """Seconds without a reading after which a GPU does not answer, if its host is still read. Source: convention; all
    GPUs of a node are read once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesyncPolicy:
    """When a rank's collectives are no longer in sync with the others'."""

    recent_steps: int = 100
    """Newest steps in which a group must still be out of sync. Source: technical; a skipped call is never caught up."""
