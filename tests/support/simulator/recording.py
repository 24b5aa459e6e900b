"""Scenario of a simulation and its recording.

scenario = Scenario(seed=3, layout=Layout(dp_replicate=8), steps=80, fault=Fault(kind="hang", step=40))
recording = simulate(scenario)               # see `scenario`
recording.log.columns("steps", recording.until)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .faults import Fault
from .layout import Layout
from .noise import QUIET, Noise
from .program import Job
from .records import Log

__all__ = ["Clock", "Event", "Recording", "Scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Errors of the nodes' wall clocks: seconds of skew by node, and a step back on one of them."""

    skew_s: tuple[float, ...] = ()
    step_back_s: float = 0.0
    step_back_node: int = 0
    step_back_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scenario to simulate. `recovers`: a bad step is refused, a good state restored, the batch skipped."""

    seed: int
    layout: Layout
    steps: int = 60
    job: Job = field(default_factory=Job)
    noise: Noise = QUIET
    fault: Fault | None = None
    clock: Clock = field(default_factory=Clock)
    backend: str = "nccl"
    on_devices: bool = False
    """Record what probes of ranks on GPUs can: see `on_devices`."""
    stamped: bool = False
    """With device times; otherwise as where events could not be recorded."""
    recovers: bool = True
    missing_tables: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class Event:
    """One line of an `events.jsonl`; `rank` -1: the node process."""

    rank: int
    time_ns: float
    kind: str
    step: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Recording:
    """Everything recorded, in ns since the run's begin."""

    scenario: Scenario
    log: Log
    events: list[Event]
    until: np.ndarray[Any, np.dtype[np.float64]]
    closed: bool
    stacks: dict[int, str] = field(default_factory=dict)
