"""Interface of experiment trackers: steps, findings, and a summary at the end.

    tracker = TensorBoardLog(folder, config)            # or WandbRun, or any other `Tracker`
    tracker.step(TrackedStep(step=40, attempt=0, wall_s=..., values={"train/loss": 2.1}))
    tracker.finding(finding.to_json(), wall_s)
    tracker.finish({"goodput_ratio": 0.92})

Names of values are paths with units: `train/loss`, `step/forward_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["TrackedStep", "Tracker", "TrackerError", "flat"]


class TrackerError(Exception):
    """Raised if a tracker cannot be written to. The message is one line: what failed, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStep:
    """One execution of a step. `ranks`: values by rank; `layers`: gradient norms by layer."""

    step: int
    attempt: int
    wall_s: float
    """End of the step, epoch seconds."""
    values: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives a run. All calls come from one thread; each may raise TrackerError.

    `place`: folder or address of the run; `next_step`: the command that shows it.
    """

    @property
    def place(self) -> str: ...

    @property
    def next_step(self) -> str: ...

    def step(self, step: TrackedStep) -> None:
        """Add one step, in the order of training."""

    def rolled_back(self, step: int, wall_s: float) -> None:
        """The run was rolled back: this step and all later ones will be added again."""

    def finding(self, finding: Mapping[str, Any], wall_s: float, *, is_news: bool = True) -> None:
        """Add a finding (`Finding.to_json`). `is_news`: the run is alive, so that an alert may be sent."""

    def flush(self) -> None:
        """Make everything so far visible."""

    def finish(self, summary: Mapping[str, str | float]) -> None:
        """Add the summary and close."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a nested configuration to (`section.key`, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
