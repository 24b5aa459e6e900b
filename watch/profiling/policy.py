"""When `watch` asks ranks to profile their next steps: the run's settings.

policy = capture_policy(run.manifest())
policy.on_anomaly, policy.cooldown_s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analyzers.run.setting import number, setting
from probes.profiling.settings import MAX_STEPS

__all__ = ["CapturePolicy", "capture_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePolicy:
    """Settings `profiler.*` of the run; those of the defaults where it has none, as an attached run."""

    on_anomaly: bool = False
    num_steps: int = 5
    cooldown_s: float = 300.0
    """Between two requests (seconds). Source: convention; a capture makes its steps slower."""
    max_captures: int = 8


def capture_policy(manifest: Mapping[str, Any]) -> CapturePolicy:
    """The settings that a run was configured with."""
    default = CapturePolicy()

    def amount(name: str, otherwise: float) -> float:
        given = number(manifest, f"profiler.{name}")
        return given if given is not None and 0 <= given < 1e9 else otherwise

    listens = setting(manifest, "profiler.on_request") is not False
    return CapturePolicy(
        on_anomaly=setting(manifest, "profiler.on_anomaly") is True and listens,
        num_steps=max(1, min(MAX_STEPS, int(amount("anomaly_steps", default.num_steps)))),
        cooldown_s=amount("cooldown_s", default.cooldown_s),
        max_captures=int(amount("max_captures", default.max_captures)),
    )
