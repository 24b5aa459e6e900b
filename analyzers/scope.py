"""The scope of an analysis: which part of a run is judged, and whether the run is alive.

    analyze(source, Scope())                                        # post-mortem: everything that was recorded
    analyze(source, Scope(attempt=2, since_step=1700, now_ns=now))  # live: the newest attempt's last steps

A policy says when something is wrong; a scope says where to look. The two have no field in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Scope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The part of a run that an analysis judges."""

    attempt: int | None = None
    """Judge only this attempt; None: all attempts."""
    since_step: int = 0
    """Judge only steps from this one on."""
    now_ns: int | None = None
    """The present (epoch nanoseconds) if the run is alive; None: the end of the records is the end of the run."""
    manifest: Mapping[str, object] = field(default_factory=dict)
    """The run's description of itself (`run.json`): configuration, versions, plan. It is untrusted, so types are
    checked."""
    stacks_dir: Path | None = None
    """Folder with the stacks that were taken during a hang."""

    @property
    def is_live(self) -> bool:
        """True while the run is alive; states that may still change are then not reported."""
        return self.now_ns is not None
