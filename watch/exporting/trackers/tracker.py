"""What an experiment tracker is told of a run: steps, findings, and in the end a summary.

    tracker = TensorBoardLog(folder, config)            # or WandbRun, or any other that fits `Tracker`
    tracker.step(TrackedStep(step=40, attempt=0, wall_s=..., values={"train/loss": 2.1}))
    tracker.finding(finding.to_json(), wall_s)
    tracker.finish({"goodput_ratio": 0.92})

Names of values are paths: `train/loss`, `step/forward_seconds`. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["TrackedStep", "Tracker", "TrackerError", "flat"]


class TrackerError(Exception):
    """A tracker that cannot be written to; the text is one line: what, where, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStep:
    """One execution of a step. `ranks` are the same kinds of values by rank; `layers` gradient norms by layer."""

    step: int
    attempt: int
    wall_s: float
    """When it ended, epoch seconds."""
    values: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)


class Tracker(Protocol):
    """Where a run is written to. All calls come from one thread; each may raise TrackerError.

    `place` is a folder or an address, `next_step` what to do to see the run, a command.
    """

    @property
    def place(self) -> str: ...

    @property
    def next_step(self) -> str: ...

    def step(self, step: TrackedStep) -> None:
        """One step, in the order of training."""

    def went_back(self, step: int, wall_s: float) -> None:
        """The run is set back: steps from this one on are trained anew."""

    def finding(self, finding: Mapping[str, Any], wall_s: float, *, is_news: bool = True) -> None:
        """A finding as `Finding.to_json` has it. `is_news`: somebody may want to be told now."""

    def flush(self) -> None:
        """What was told so far can be seen."""

    def finish(self, summary: Mapping[str, str | float]) -> None:
        """The end."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested configuration as (`section.key`, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
