"""Load the newest state from which a restart may continue: a copy in memory that outlived its process, or a checkpoint.

    loaded = load_newest(memory, disk, ledger)      # all ranks; None if there is neither

A copy in memory is used if it is not older than the newest checkpoint on disk;
`trainer.checkpoint.memory_tier.survivors` decides which copies are usable.
"""

from __future__ import annotations

from probes.guard.ledger import Ledger
from probes.tape import event_kinds
from trainer.checkpoint.agreement import first_error
from trainer.checkpoint.disk_tier.checkpoints import DiskCheckpoints
from trainer.checkpoint.disk_tier.loading import Loaded
from trainer.checkpoint.memory_tier.copies import MemoryCopies
from trainer.checkpoint.memory_tier.survivors import newest_survivor, remove_unused

__all__ = ["load_newest"]


def load_newest(memory: MemoryCopies, disk: DiskCheckpoints, ledger: Ledger) -> Loaded | None:
    """Load the newest state into the training. All ranks. Raises CheckpointError if there are checkpoints but none is
    usable.
    """
    rank, world_size = memory.training.rank, memory.training.plan.world_size
    found = newest_survivor(
        memory.folder, memory.mesh(), rank, world_size, memory.peers, ledger, newer_than=max(0, disk.newest(ledger))
    )
    error = ""
    if found is not None:
        try:
            memory.adopt(found)
        except (RuntimeError, KeyError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if first_error(error):
            memory.forget_from(0)
            found = None
    if found is None:
        memory.remove()
    remove_unused(memory.folder, memory.peers, rank)
    if found is None:
        return disk.load_newest(ledger)
    disk.adopt(ledger, found.copy.step)
    if rank == 0:
        disk.recorder.event(event_kinds.CHECKPOINT, step=found.copy.step, tier="memory", state="loaded")
    return Loaded(values=found.copy.values, extra=found.note["extra"])
