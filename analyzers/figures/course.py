"""Data for figures of the course of a run: its loss, what happened to the training, and its events.

    curve = loss_curve(store)                      # columns, one element per step
    marks(store)[0].kind                           # "rollback"

Missing tables give empty results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["Mark", "StoryEvent", "loss_curve", "marks", "story"]

_NOT_SHOWN = (event_kinds.RANK, event_kinds.PROCESS_GROUP, event_kinds.RANK_CLOSED, event_kinds.FINDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to the training at a step."""

    kind: str
    step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """One event of the run."""

    wall_ns: int
    attempt: int
    rank: int
    kind: str
    step: int | None
    detail: dict[str, Any]


def loss_curve(source: Source) -> dict[str, npt.NDArray[Any]]:
    """Columns step, loss, grad_norm, kept (bool), per execution in training order, from the first rank with losses."""
    if not source.has("steps"):
        return {name: np.zeros(0) for name in ("step", "loss", "grad_norm", "kept")}
    return source.query(
        """
        SELECT step, loss, grad_norm,
               coalesce(committed, true) AND step < coalesce(min(step) OVER (
                   ORDER BY attempt, start_ns ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING), step + 1) AS kept
        FROM steps
        WHERE duration_ns IS NOT NULL AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
        ORDER BY attempt, start_ns
        """
    )


def marks(source: Source) -> list[Mark]:
    """Rollbacks, checkpoints on disk, skipped batches, injected faults and restarts."""
    kinds = (
        event_kinds.ROLLBACK,
        event_kinds.CHECKPOINT,
        event_kinds.BATCH_SKIPPED,
        event_kinds.FAULT_INJECTED,
        event_kinds.ATTEMPT_STARTED,
    )
    log = EventLog.load(source, kinds)
    found = [
        Mark(
            kind="rollback",
            step=e.integer("from_step"),
            text=f"back to step {e.integer('to_step')}: {e.text('reason')}",
        )
        for e in log.of(event_kinds.ROLLBACK)
    ]
    found += [
        Mark(kind="checkpoint", step=e.step, text=f"checkpoint {e.text('path')}")
        for e in log.of(event_kinds.CHECKPOINT)
        if e.text("tier") == "disk" and e.text("state") == "complete"
    ]
    found += [
        Mark(kind="skipped batch", step=e.step, text=f"batch {e.integer('batch_index')}: {e.text('reason')}")
        for e in log.of(event_kinds.BATCH_SKIPPED)
    ]
    found += [
        Mark(kind="fault injected", step=e.step, text=f"{e.text('fault')} on rank {e.rank}")
        for e in log.of(event_kinds.FAULT_INJECTED)
    ]
    if source.has("steps"):
        first = dict(source.rows("SELECT attempt, min(step) FROM steps WHERE attempt > 0 GROUP BY attempt"))
        found += [Mark(kind="restart", step=step, text=f"attempt {attempt}") for attempt, step in sorted(first.items())]
    return found


def story(source: Source, *, limit: int = 400) -> list[StoryEvent]:
    """Events of the run; only the first and the last ones if there are more than `limit`."""
    if not source.has("events"):
        return []
    kinds = [str(kind) for (kind,) in source.rows("SELECT DISTINCT kind FROM events") if kind not in _NOT_SHOWN]
    log = EventLog.load(source, kinds) if kinds else EventLog([])
    events = sorted((event for kind in kinds for event in log.of(kind)), key=lambda event: event.wall_ns)
    if len(events) > limit:
        events = events[: limit // 2] + events[-limit // 2 :]
    return [
        StoryEvent(wall_ns=e.wall_ns, attempt=e.attempt, rank=e.rank, kind=e.kind, step=e.step, detail=e.detail)
        for e in events
    ]
