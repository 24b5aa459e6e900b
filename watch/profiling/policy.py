"""When `watch` asks ranks to profile their next steps: the run's settings.

policy = capture_policy(run.manifest())
policy.on_anomaly, policy.cooldown_s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probes.settings.section import read
from probes.settings.sections import ProfilerSettings

__all__ = ["CapturePolicy", "capture_policy"]

_DEFAULT = ProfilerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePolicy:
    """Settings `profiler.*` of the run; those of the defaults where it has none, as an attached run."""

    on_anomaly: bool = _DEFAULT.on_anomaly
    num_steps: int = _DEFAULT.anomaly_steps
    cooldown_s: float = _DEFAULT.cooldown_s
    """Between two requests (seconds). Source: convention; a capture makes its steps slower."""
    max_captures: int = _DEFAULT.max_captures


def capture_policy(manifest: Mapping[str, Any]) -> CapturePolicy:
    """The settings that a run was configured with."""
    given = read(ProfilerSettings, manifest)
    return CapturePolicy(
        on_anomaly=given.on_anomaly and given.on_request,
        num_steps=given.anomaly_steps,
        cooldown_s=given.cooldown_s,
        max_captures=given.max_captures,
    )
