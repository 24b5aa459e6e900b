"""Arm a rank with the requested faults, through hooks and wrappers that exist only in such a run.

    distort_clock(faults, rank=2)                                      # before anything is recorded
    arm(faults, training, recorder, run, rank=2, world_size=4)

Before it acts, each fault writes a marker to disk and an event; the marker prevents it from firing twice in a run. Each
family of faults has a module with a table of functions that arm its kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from probes.recorder import Recorder
from probes.tape.rundir import RunDir
from trainer.faults.catalogue import CATALOGUE
from trainer.faults.injectors import collective, data, integrity, node, numeric, process, slow_compute, storage, timing
from trainer.faults.injectors.node import distort_clock
from trainer.faults.options import Fault, FaultError
from trainer.faults.trigger import Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM", "arm", "distort_clock"]

ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    **process.ARM,
    **collective.ARM,
    **data.ARM,
    **numeric.ARM,
    **integrity.ARM,
    **timing.ARM,
    **slow_compute.ARM,
    **node.ARM,
    **storage.ARM,
}
"""Function that prepares a rank for each kind."""


def arm(
    faults: Sequence[Fault],
    training: Training,
    recorder: Recorder,
    run: RunDir,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Prepare `training` on this rank for its faults. Raises FaultError for a rank or parameter that does not exist.

    Must be called on every rank, because some kinds create a process group.
    """
    for number, fault in enumerate(faults):
        if fault.rank >= world_size:
            if recorder.attempt > 0:
                continue  # the world has shrunk since the launch, and the rank no longer exists
            raise FaultError(f"--fault {fault.kind}: rank = {fault.rank}: the run has ranks 0 to {world_size - 1}")
        is_target = fault.rank in (-1, rank) or _same_rows(fault, training)
        if is_target or CATALOGUE[fault.kind].armed_everywhere:
            ARM[fault.kind](Trigger(fault, number, recorder, run, rank, is_target=is_target), training)


def _same_rows(fault: Fault, training: Training) -> bool:
    """True if the fault strikes a batch, and this rank reads the same rows as the struck rank. All ranks of a
    tensor-parallel group read the same rows: a batch that is bad for one of them is bad for all."""
    return "batch" in CATALOGUE[fault.kind].keys and training.plan.data_rank(fault.rank) == training.data_rank
