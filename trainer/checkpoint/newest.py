"""The newest state that a restart may go on from: a copy in memory that outlived the processes, or a checkpoint.

    loaded = load_newest(memory, disk, ledger)      # all ranks; None if there is neither

A copy in memory is taken only if every rank has it, with hashes that agree, healthy steps followed it, it holds no
batch that was given up since, and it is not older than the newest checkpoint on disk.
"""

from __future__ import annotations

import contextlib

from trainer.checkpoint.agreement import everyone, first_error
from trainer.checkpoint.disk import DiskCheckpoints
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.loading import Loaded
from trainer.checkpoint.memory import MemoryCopies
from trainer.checkpoint.state import Values

__all__ = ["load_newest"]


def load_newest(memory: MemoryCopies, disk: DiskCheckpoints, ledger: Ledger) -> Loaded | None:
    """Load it into the training. All ranks. Raises CheckpointError if there are checkpoints and none can be used."""
    step = _common_step(memory, ledger)
    if step < 0 or step < disk.newest(ledger):
        memory.adopt(-1)
        return disk.load_newest(ledger)
    adopted, error = None, ""
    try:
        adopted = memory.adopt(step)
    except (RuntimeError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if first_error(error) or adopted is None:
        memory.forget_from(0)
        return disk.load_newest(ledger)
    values, extra = adopted
    disk.adopt(ledger, step)
    if memory.training.rank == 0:
        disk.recorder.event("checkpoint", step=step, tier="memory", state="loaded")
    return Loaded(values=values, extra=extra)


def _common_step(memory: MemoryCopies, ledger: Ledger) -> int:
    """Newest step of which every rank has a copy that may be used; -1 if there is none. All ranks."""
    own = []
    for note in memory.survivors():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            position = Values.from_json(note["values"]).position
            stale = ledger.gave_up_since(Ledger.from_json(note["extra"]["ledger"]), position.batch_index)
            own.append([position.step, bool(note["vetted"]), stale])
    by_rank = [{step: (vetted, stale) for step, vetted, stale in notes} for notes in everyone(own)]
    common = set.intersection(*(set(notes) for notes in by_rank))
    # Healthy steps are those of the whole run: one rank that came to vetting a copy speaks for all.
    usable = [
        step
        for step in common
        if any(notes[step][0] for notes in by_rank) and not any(notes[step][1] for notes in by_rank)
    ]
    return max(usable, default=-1)
