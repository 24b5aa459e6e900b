"""Copies of this rank's shard in host memory: the first thing to roll back to, and the source of saves to disk.

    copies = MemoryCopies(training, healthy_steps=3, interval=10, folder=shared_folder(run.path))
    copies.take(values, vetted=True)
    copies.promote(step)                    # steps up to here were healthy
    values = copies.restore(before_step=40)  # newest vetted copy taken before step 40; None if there is none
    copy = copies.lend(values)              # of the state as it is now, for a save in the background
    copies.survivors(); copies.adopt(40)    # after a restart: what the killed process left

Each rank keeps its own copies, and all ranks take, promote and restore them at the same steps, so nothing has to be
agreed upon. A copy is vetted once `healthy_steps` steps after it were healthy; there are just enough copies that one
is always vetted, and one more while a save reads an old one.

A launcher restarts all ranks of a node when one of them dies, so a copy on a neighbouring rank would die too. These lie
in the node's shared memory instead, which belongs to no process; where it has no room for them, in private memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.host_copy import HostCopy, private_memory
from trainer.checkpoint.manifest import CheckpointError
from trainer.checkpoint.shared_folder import PID_NAME
from trainer.checkpoint.slots import Slot
from trainer.checkpoint.state import Values
from trainer.recovery import fence
from trainer.training import Training

__all__ = ["MemoryCopies"]


class MemoryCopies:
    """The copies of one rank, oldest first."""

    def __init__(self, training: Training, *, healthy_steps: int, interval: int, folder: Path | None = None) -> None:
        self.training = training
        self.healthy_steps = healthy_steps
        self.problem = ""
        """Why the copies do not outlive the process, in one line."""
        self._limit = 1 + -(-healthy_steps // max(1, interval))
        self._copies: list[HostCopy] = []
        self._spare: list[HostCopy] = []
        self._folder = folder and folder / f"rank-{training.rank:05d}"
        self._num_slots = 0
        self._prefix = f"a{fence.held_attempt()}-"
        self._left: dict[int, tuple[HostCopy, dict[str, Any]]] = {}
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="rankscope-seal")

    @property
    def steps(self) -> list[int]:
        """Steps of the copies that there are, oldest first."""
        return [copy.step for copy in self._copies]

    def take(self, values: Values, *, vetted: bool = False, extra: Mapping[str, Any] | None = None) -> int:
        """Copy the state as it is now; returns the size in bytes. `extra` is found again after a restart."""
        if len(self._copies) >= self._limit:
            self._spare.append(self._copies.pop(0))
        copy = self._free()
        copy.fill(self.training, values, vetted=vetted)
        self._copies.append(copy)
        if copy.slot is not None:
            content = {"values": values.to_json(), "extra": dict(extra or {}), "mesh": self._mesh()}
            copy.sealing = self._sealer.submit(self._seal, copy, copy.slot, content)
        return copy.nbytes

    def lend(self, values: Values) -> HostCopy:
        """A copy of the state as it is now, which nobody writes to while it has borrowers; taken if there is none."""
        if self._copies and self._copies[-1].step == values.position.step:
            return self._copies[-1]
        copy = self._free()
        copy.fill(self.training, values)
        self._spare.append(copy)
        return copy

    def promote(self, step: int) -> list[int]:
        """Vet the copies that `healthy_steps` steps up to `step` have followed; returns their steps."""
        fresh = [copy for copy in self._copies if not copy.vetted and copy.step + self.healthy_steps <= step]
        for copy in fresh:
            copy.vetted = True
            # Without its note it is still being hashed, and who hashes it looks at `vetted` after writing the note.
            if copy.slot is not None and copy.slot.note_path.exists():
                copy.slot.vet()
        return [copy.step for copy in fresh]

    def forget_from(self, step: int) -> list[int]:
        """Drop the copies that hold the update of `step` or a later one; returns their steps."""
        gone = [copy for copy in self._copies if copy.step >= step]
        self._copies = [copy for copy in self._copies if copy.step < step]
        self._spare += gone
        for copy in gone:
            if copy.slot is not None:
                if copy.sealing is not None:
                    copy.sealing.exception()  # waits
                copy.slot.invalidate()
        return [copy.step for copy in gone]

    def restore(self, before_step: int) -> Values | None:
        """Put back the newest vetted copy that lacks the update of `before_step`, and forget the later ones."""
        candidates = [copy for copy in self._copies if copy.vetted and copy.step < before_step]
        if not candidates:
            return None
        copy = candidates[-1]
        self.forget_from(copy.step + 1)
        return copy.restore(self.training)

    # After a restart.

    def survivors(self) -> list[dict[str, Any]]:
        """What a former process of this rank left, on the same mesh and with hashes that agree: its notes, with
        `step` and `vetted`."""
        notes = []
        for slot in Slot.all_in(self._folder) if self._folder is not None else ():
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
                note, tensors, rng = slot.open()
                if note["mesh"] != self._mesh():
                    continue
                copy = HostCopy()
                copy.values, copy.tensors, copy.rng = Values.from_json(note["values"]), tensors, rng
                self._left[copy.step] = (copy, note)
                notes.append({"step": copy.step, "vetted": slot.vetted, **note})
        return notes

    def adopt(self, step: int) -> tuple[Values, dict[str, Any]] | None:
        """Load the surviving copy of a step into the training, and forget the others; None: forget all.

        A step that no survivor has is none. Returns its values and its note's `extra`.
        """
        left, self._left = self._left, {}
        if step not in left:
            self.remove()
            return None
        copy, note = left[step]
        values = copy.restore(self.training)
        self._remove_former(keep_step=step)
        self.take(values, vetted=True, extra=note["extra"])  # once it is sealed, the former process's can go too
        return values, note["extra"]

    def remove(self) -> None:
        """Give shared memory back: nobody needs the copies after this process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()  # by the last rank

    # Pieces of the above.

    def _free(self) -> HostCopy:
        """Buffers that nobody reads."""
        for copy in self._spare:
            if not copy.in_use:
                self._spare.remove(copy)
                return copy
        slot = None
        if self._folder is not None and not self.problem:
            slot = Slot(self._folder / f"slot-{self._prefix}{self._num_slots}")
            self._num_slots += 1
        copy = HostCopy(slot=slot)
        copy.allocate = lambda live: self._allocate(copy, live)
        return copy

    def _allocate(self, copy: HostCopy, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shared memory if it has room for all copies of all ranks on this node, else private."""
        if copy.slot is not None:
            try:
                copy.slot.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (copy.slot.path.parent / PID_NAME).write_text(str(os.getpid()))
                ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.training.plan.world_size))
                to_come = max(1, self._limit + 1 - len(self._copies) - len(self._spare))
                return copy.slot.allocate(live, share_of=ranks * to_come)
            except OSError as error:
                self.problem = f"copies in memory do not survive a restart: {error}"
                copy.slot.path.unlink(missing_ok=True)
                copy.slot = None
        return private_memory(live)

    def _seal(self, copy: HostCopy, slot: Slot, content: Mapping[str, Any]) -> None:
        slot.seal(content, copy.rng)
        if copy.vetted:
            slot.vet()
            self._remove_former()

    def _remove_former(self, keep_step: int = -1) -> None:
        """Delete the files of former processes of this rank, unfinished ones too, but not the copy of one step."""
        assert self._folder is not None
        kept = {slot.path.name for slot in Slot.all_in(self._folder) if slot.step == keep_step}
        for path in self._folder.glob("slot-*"):
            if path.name.partition(".")[0] not in kept and not path.name.startswith(f"slot-{self._prefix}"):
                path.unlink(missing_ok=True)

    def _mesh(self) -> dict[str, Any]:
        """What must be the same for another process to take a copy over."""
        training = self.training
        return {"sizes": dict(training.plan.sizes), "rank": training.rank, "model": training.config.model.model_dump()}
