"""Thresholds of deaths. Limits of silence, which separate a death from a hang: `analyzers.run.policy`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeathPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathPolicy:
    """When a death counts as having no cause, and which ranks' ends a launcher's end explains."""

    report_s: float = 1.5
    """Seconds after a death, while the run lives, before it counts as having no cause. Source: the launcher polls every
    0.1 s and `watch` reads once a second, so its exit status arrives within this time."""
    others_follow_s: float = 10.0
    """Seconds after a rank's exit with code 0, while the run lives, in which silent ranks may still exit normally.
    Source: two ranks on an H100 left their communicators 2 s apart."""
    before_launcher_s: float = 3.0
    """Ranks that ended at most this long before the launcher's end was noticed may have ended because of it (seconds);
    earlier ends have another cause. Source: `watch` looks once a second, and a busy machine delays it."""
