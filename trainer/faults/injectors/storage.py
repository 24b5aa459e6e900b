"""Faults of checkpoints and their disk: a kill during a save, damaged shards, a full or slow disk.

    ARM["torn_checkpoint"](trigger, training)

A damaged checkpoint is noticed when the next attempt loads it, so the rank is killed after the damage.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.continuity import signature
from trainer.checkpoint.disk_tier import saving
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.faults.trigger import FaultyLoader, Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM"]

_MAX_FILE_BYTES = 64 << 10
"""File size limit: enough for events, but not for a shard."""
_RELIEVED_AFTER_STEPS = 12


def _arm_kill_in_save(trigger: Trigger, training: Training) -> None:
    """Kill the rank in its first save at or after the fault's step, between writing its shard and the shard's hash."""
    sign, due = signature, [False]

    class Waiting(FaultyLoader):
        def before(self) -> None:
            due[0] = due[0] or trigger.due()

    def signature_or_kill(*values: Any) -> dict[str, int]:
        if due[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return sign(*values)

    Waiting(training)
    saving.signature = signature_or_kill  # type: ignore[attr-defined, assignment]  # replaced on purpose, for this run only


def _arm_damage(damage: Callable[[Path], None]) -> Callable[[Trigger, Training], None]:
    def arm(trigger: Trigger, training: Training) -> None:
        class Damaging(FaultyLoader):
            def before(self) -> None:
                if trigger.spent or trigger.step < trigger.fault.step:
                    return
                folder = trigger.run.checkpoints
                saved = checkpoint_steps(folder)
                if len(saved) < 2 or any(folder.glob("step-*.tmp")):
                    return  # there is no older checkpoint to fall back to, or a newer one is being written
                trigger.fire()
                damage(folder / f"step-{max(saved):08d}" / f"__{trigger.rank}_0.distcp")
                os.kill(os.getpid(), signal.SIGKILL)

        Damaging(training)

    return arm


def _tear(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def _flip(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def _arm_disk_full(trigger: Trigger, training: Training) -> None:
    """Make the kernel refuse writes as on a full disk, but with EFBIG instead of ENOSPC. Ends after some steps."""
    fault, before = trigger.fault, resource.getrlimit(resource.RLIMIT_FSIZE)
    until = fault.until or fault.step + _RELIEVED_AFTER_STEPS

    class Filling(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, before[1]))
            elif trigger.firing and trigger.step == until + 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    Filling(training)


def _arm_slow_disk(trigger: Trigger, training: Training) -> None:
    sync, slow = os.fsync, [False]

    class Slow(FaultyLoader):
        def before(self) -> None:
            slow[0] = trigger.lasting()

    def slow_sync(fd: Any) -> None:
        if slow[0]:
            time.sleep(trigger.fault.seconds or 1.0)
        sync(fd)

    Slow(training)
    os.fsync = slow_sync


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "kill_in_save": _arm_kill_in_save,
    "torn_checkpoint": _arm_damage(_tear),
    "flipped_checkpoint": _arm_damage(_flip),
    "disk_full": _arm_disk_full,
    "slow_disk": _arm_slow_disk,
}
