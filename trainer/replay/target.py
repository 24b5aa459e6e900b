"""Target of a replay: the execution of a step and the updates before it, from the run's records and checkpoints.

    target = find_target(store, run, step=40)
    target.batch_index, target.kind         # 39, "non_finite"
    target.state_step, target.updates       # 32, and the recorded updates of steps 33 to 39 (batch, learning rate)

A step may run more than once, after a rollback or a restart. The target is the execution that went wrong: the first one
that was refused or not finite. If there is none, it is the last execution. It is replayed from the newest earlier
checkpoint that the guard found good. Without one, it is replayed from the newest earlier checkpoint, or else from the
initial state, which the seed determines. The records hold the batches and learning rates in between, so the same
updates can be recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from analyzers.numerics.nonfinite import non_finite_values
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.guard.ledger import LEDGER_NAME, Ledger
from probes.tape import event_kinds
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError, read_manifest
from trainer.checkpoint.state import Values

__all__ = ["ReplayError", "Target", "Update", "find_target"]

LEVEL_STEPS = 20
"""Number of steps before a spike. The median loss of these steps is the usual level if no event has recorded the level.
"""


class ReplayError(ValueError):
    """The step cannot be replayed; the message is one line with the reason and the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A recorded step: its batch, and its learning rate (None: the rate of the configuration)."""

    step: int
    batch_index: int
    rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One execution of a step, and the state from which it is replayed."""

    step: int
    attempt: int
    batch_index: int
    kind: Literal["healthy", "non_finite", "spike"]
    loss: float
    grad_norm: float
    loss_level: float
    """For a spike: the usual loss before it."""
    ranks: tuple[int, ...]
    """Ranks that caused the fault according to the records; empty for a healthy step."""
    checkpoint: str
    """Checkpoint folder; empty for the initial state."""
    state_step: int
    is_good: bool
    updates: tuple[Update, ...]
    """Steps between the state and the target."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Target:
        updates = tuple(Update(**update) for update in loaded["updates"])
        return cls(**(loaded | {"updates": updates, "ranks": tuple(loaded["ranks"])}))


def find_target(source: Source, run: RunDir, step: int) -> Target:
    """Find the target. Raises ReplayError if the step was not recorded, or the updates before it are unknown."""
    if not source.has("steps"):
        raise ReplayError(f"{run.path} has no recorded steps.")
    attempt, start_ns, batch_index, loss, norm, was_taken = _execution(source, run, step)
    kind, level = _kind(source, attempt, step, loss, norm, was_taken)
    checkpoint, state_step, is_good = _state(run, step, batch_index)
    return Target(
        step=step,
        attempt=attempt,
        batch_index=batch_index,
        kind=kind,
        loss=loss,
        grad_norm=norm,
        loss_level=level,
        ranks=_blamed_ranks(source, attempt, step) if kind == "non_finite" else (),
        checkpoint=str(checkpoint or ""),
        state_step=state_step,
        is_good=is_good,
        updates=_updates(source, state_step, step, start_ns),
    )


def _execution(source: Source, run: RunDir, step: int) -> tuple[int, int, int, float, float, bool]:
    """Find the execution of the step that went wrong. If none did, take the last execution. Returns its attempt, start
    time in nanoseconds, batch, loss and gradient norm, and True if its update was taken."""
    rows = source.rows(
        "SELECT attempt, start_ns, batch_index, coalesce(loss, 'nan'::DOUBLE), coalesce(grad_norm, 'nan'::DOUBLE), "
        "committed IS NOT FALSE FROM steps WHERE step = ? AND rank >= 0 AND batch_index IS NOT NULL "
        "AND duration_ns IS NOT NULL QUALIFY rank = min(rank) OVER (PARTITION BY attempt) ORDER BY start_ns",
        [step],
    )
    if not rows:
        ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE duration_ns IS NOT NULL")
        recorded = f"it has steps {first} to {last}" if first is not None else "it has no step"
        raise ReplayError(f"--step {step}: not recorded in {run.path}: {recorded}.")
    bad = [row for row in rows if not (row[5] and math.isfinite(row[3]) and math.isfinite(row[4]))]
    attempt, start_ns, batch_index, loss, norm, was_taken = (bad or rows[-1:])[0]
    return int(attempt), int(start_ns), int(batch_index), float(loss), float(norm), bool(was_taken)


def _kind(
    source: Source, attempt: int, step: int, loss: float, norm: float, was_taken: bool
) -> tuple[Literal["healthy", "non_finite", "spike"], float]:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "non_finite", math.nan
    log = EventLog.load(source, (event_kinds.REPLAY, event_kinds.ROLLBACK, event_kinds.BATCH_SKIPPED), attempt)
    replays = [event for event in log.of(event_kinds.REPLAY, step=step) if event.text("verdict") == "spike"]
    if replays:
        return "spike", replays[0].number("loss_level") or math.nan
    if was_taken:
        return "healthy", math.nan
    rows = source.rows(
        "SELECT loss FROM steps WHERE attempt = ? AND step < ? AND committed AND isfinite(loss) AND rank >= 0 "
        "ORDER BY step DESC, rank LIMIT ?",
        [attempt, step, LEVEL_STEPS],
    )
    return "spike", median(float(value) for (value,) in rows) if rows else math.nan


def _blamed_ranks(source: Source, attempt: int, step: int) -> tuple[int, ...]:
    """Ranks that caused a non-finite value according to the records."""
    for finding in non_finite_values(source, Scope()):
        first, last = finding.first_step, finding.last_step
        if finding.attempt in (None, attempt) and first is not None and first <= step <= (last or first):
            return finding.ranks
    return ()


def _state(run: RunDir, step: int, batch_index: int) -> tuple[Path | None, int, bool]:
    """Checkpoint folder and step of the state to replay from (None and 0: the initial state), and True if enough
    healthy steps have followed that state."""
    ledger, _ = Ledger.load(run.checkpoints / LEDGER_NAME)
    good = ledger.good_step if ledger.good_step is not None else -1
    usable: list[tuple[bool, int, Path]] = []
    for saved in checkpoint_steps(run.checkpoints):
        folder = run.checkpoints / f"step-{saved:08d}"
        if saved >= step:
            continue
        try:
            position = Values.from_json(read_manifest(folder)["values"]).position
        except (CheckpointError, StorageError, KeyError, TypeError, ValueError):
            continue  # this checkpoint is damaged, so an older one is used
        if position.batch_index <= batch_index:  # otherwise it was saved after a rollback: it has seen later batches
            usable.append((saved <= good, saved, folder))
    if not usable:
        return None, 0, True
    is_good, saved, folder = max(usable)
    return folder, saved, is_good


def _updates(source: Source, state_step: int, step: int, start_ns: int) -> tuple[Update, ...]:
    """The updates between the state and the step. If a step was executed more than once, its update is of the execution
    that was kept."""
    rows: Sequence[tuple[Any, ...]] = source.rows(
        "SELECT step, arg_max(batch_index, start_ns), arg_max(lr, start_ns) FROM steps WHERE rank >= 0 "
        "AND step > ? AND step < ? AND start_ns < ? AND committed IS NOT FALSE AND batch_index IS NOT NULL "
        "AND duration_ns IS NOT NULL GROUP BY step ORDER BY step",
        [state_step, step, start_ns],
    )
    found = {int(row[0]) for row in rows}
    if lost := [number for number in range(state_step + 1, step) if number not in found]:
        which = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps from {lost[0]} on"
        raise ReplayError(
            f"--step {step}: the newest usable state is that of step {state_step}, and which batches were taken in "
            f"{which} since is not recorded; choose a step right after a checkpoint"
        )
    return tuple(
        Update(step=int(number), batch_index=int(batch), rate=None if rate is None else float(rate))
        for number, batch, rate in rows
    )
