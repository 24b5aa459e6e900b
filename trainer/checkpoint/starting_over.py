"""Start a run over, once per launch that requests it, and move earlier checkpoints aside.

    first = start_over_if_asked(run, recorder, resume=True, is_chief=rank == 0)     # all ranks, before loading
    forget_copies(shared_folder, before_attempt=first)          # all ranks: remove older copies in memory

`rankscope train` requests it in `run.json`: `start_over_at` is the first attempt of the launch. Under another launcher
the ranks' configuration requests it, but only their first attempt starts over. Rank 0 moves existing checkpoints to
`checkpoints/before-attempt-3/`, then writes `started-over.json`, so that only the first attempt of the launch that gets
this far starts over, and later attempts resume. Nothing is deleted from the disk, and nothing reads checkpoints from
that folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.files.safe_open import read_plain
from probes.tape.rundir import RunDir
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.agreement import from_rank_0
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError, write_json
from trainer.checkpoint.memory_tier.slots import Slot
from trainer.checkpoint.memory_tier.survivors import state_of

__all__ = ["forget_copies", "start_over_if_asked", "start_over_is_due"]

NOTE_NAME = "started-over.json"


def start_over_if_asked(run: RunDir, recorder: Recorder, *, resume: bool, is_chief: bool) -> int:
    """Return the first attempt since the run was last started over. All ranks, before loading.

    Raises StorageError on all ranks if a checkpoint cannot be moved, because it would later be loaded.
    """
    first, problem = 0, ""
    if is_chief:
        try:
            requested, started_over = _requested_at(run, resume=resume), _started_over_at(run.checkpoints)
            if requested is not None and requested != started_over:
                _move_aside(run.checkpoints, requested, recorder)
                started_over = requested
            first = started_over or 0
        except OSError as error:
            problem = f"{run.checkpoints}: cannot be read or moved aside now ({error.strerror})"
    agreed, problem = from_rank_0([first, problem])
    if problem:
        raise StorageError(problem)
    return int(agreed)


def start_over_is_due(run: RunDir) -> bool:
    """Return True if the launch has requested to start over and rank 0 has not done so yet. Raises OSError."""
    requested = run.manifest().get("start_over_at")
    return isinstance(requested, int) and requested != _started_over_at(run.checkpoints)


def forget_copies(folder: Path | None, *, before_attempt: int) -> None:
    """In this node's shared memory, remove copies of states that were computed before `before_attempt`.

    Needed in every attempt: a node that was absent when the run was started over may return with old copies.
    """
    for place in folder.glob("rank-*") if folder is not None else ():
        for slot in Slot.all_in(place):
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):  # unusable, or already deleted
                _, attempt, _ = state_of(slot.note())
                if attempt < before_attempt:
                    slot.invalidate()
                    slot.path.unlink(missing_ok=True)


def _requested_at(run: RunDir, *, resume: bool) -> int | None:
    """The attempt in which starting over was requested; None if it was not."""
    requested = run.manifest().get("start_over_at")
    if isinstance(requested, int):
        return requested
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    return fence.held_attempt() if is_first_start and not resume else None


def _started_over_at(checkpoints: Path) -> int | None:
    """The attempt in which the run was last started over; None if it never was."""
    try:
        return int(json.loads(read_plain(checkpoints / NOTE_NAME, 1 << 16))["attempt"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _move_aside(checkpoints: Path, attempt: int, recorder: Recorder) -> None:
    """Move all checkpoints aside, including condemned ones. The oldest checkpoints are moved first, so that after an
    interruption the newest ones are still in place.
    """
    aside = checkpoints / f"before-attempt-{attempt}"
    # Path.glob treats an unreadable folder as empty.
    for path in sorted(checkpoints / name for name in os.listdir(checkpoints) if name.startswith("step-")):
        aside.mkdir(exist_ok=True)
        fence.check()
        path.rename(aside / path.name)
        number = path.name.removeprefix("step-").partition(".")[0]
        recorder.event(
            event_kinds.CHECKPOINT,
            step=int(number) if number.isdecimal() else None,
            tier="disk",
            state="removed",
            path=f"{checkpoints.name}/{aside.name}/{path.name}",
            reason="the run was started over: this checkpoint is kept here and not used",
        )
    write_json(checkpoints / NOTE_NAME, {"attempt": attempt})
