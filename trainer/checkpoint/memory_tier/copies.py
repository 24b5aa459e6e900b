"""Copies of this rank's shard in host memory: the first choice for a rollback, and the source of saves to disk.

    copies = MemoryCopies(training, healthy_steps=3, interval=10, folder=shared_folder(run.path), peers=None)
    copies.take(values, vetted=True)        # only this part blocks training
    copies.seal()                           # the rest, in the background
    copies.promote(step)                    # steps up to here were healthy
    values = copies.restore(before_step=40)  # newest vetted copy taken before step 40; None if there is none
    copy = copies.lend(values)              # a copy of the current state, for a save in the background
    copies.adopt(survivor)                  # after a restart: load the copy that the killed process left

All ranks take, promote and restore their copies at the same steps, so they need no agreement. A copy is vetted once
`healthy_steps` healthy steps have followed it. The number of copies is the smallest with which one copy is always
vetted. While a save reads an old copy, there is one more.

A launcher restarts all ranks of a node when one of them dies, so a copy in another process of the node would be lost.
Therefore copies are in the node's shared memory, which outlives processes. If shared memory has no space, they are in
private memory. With several nodes each copy has a duplicate in another node's shared memory
(`trainer.checkpoint.memory_tier.peers`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from probes.tape.files.shared_memory import PID_NAME
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.memory_tier.copy_stream import Copying, CopyStream
from trainer.checkpoint.memory_tier.host_copy import HostCopy, private_memory
from trainer.checkpoint.memory_tier.peers import PeerCopies, rank_folder
from trainer.checkpoint.memory_tier.slots import Slot, remove_others
from trainer.checkpoint.memory_tier.survivors import Survivor
from trainer.checkpoint.state import Values
from trainer.training.rank_training import Training

__all__ = ["MemoryCopies"]

_LOST = "copies in memory do not survive a restart"


class MemoryCopies:
    """The copies of one rank, oldest first."""

    def __init__(
        self,
        training: Training,
        *,
        healthy_steps: int,
        interval: int,
        folder: Path | None = None,
        peers: PeerCopies | None = None,
        stream: Copying | None = None,
    ) -> None:
        self.training = training
        if stream is None and training.device.type == "cuda":
            stream = CopyStream(training.device)
        self._stream = stream
        if stream is not None:
            training.optimizer.register_step_pre_hook(lambda *_: stream.join())
        self.healthy_steps = healthy_steps
        self.problem = ""
        """Reason why the copies do not outlive the process, one line."""
        self._limit = 1 + -(-healthy_steps // max(1, interval))
        self._copies: list[HostCopy] = []
        self._spare: list[HostCopy] = []
        self.folder = folder
        """Folder of this node's copies; None if they do not outlive the process."""
        self.peers = peers
        self._folder = folder and rank_folder(folder, training.rank)
        self._num_rollbacks = 0
        self._unsealed: tuple[HostCopy, Slot, dict[str, Any]] | None = None
        self._num_slots = 0
        self._prefix = f"a{fence.held_attempt()}-"
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="rankscope-seal")

    @property
    def steps(self) -> list[int]:
        """Steps of the existing copies, oldest first."""
        return [copy.step for copy in self._copies]

    def take(
        self,
        values: Values,
        *,
        vetted: bool = False,
        extra: Mapping[str, Any] | None = None,
        origin: Sequence[int] | None = None,
    ) -> int:
        """Copy the current state; returns the size in bytes. `extra` and `origin` are kept in the copy's note, and can
        be read after a restart. `origin`: the attempt that computed the state, and its rollbacks until then.
        """
        if len(self._copies) >= self._limit:
            self._spare.append(self._copies.pop(0))
        copy = self._free()
        copy.fill(self.training, values, vetted=vetted)
        self._copies.append(copy)
        if copy.slot is not None:
            origin = origin or (fence.held_attempt(), self._num_rollbacks)
            self._unsealed = (copy, copy.slot, {"extra": dict(extra or {}), "origin": [*origin]})
        return copy.nbytes

    def seal(self) -> None:
        """Hash the last copy and send it to another node, in the background. Best called at the end of a step, because
        the hashing thread needs the GIL immediately.
        """
        if self._unsealed is not None:
            (copy, slot, content), self._unsealed = self._unsealed, None
            copy.sealing = self._sealer.submit(self._seal, copy, slot, content)

    def wait_until_sealed(self) -> None:
        """Wait until every copy is hashed, and the hashing thread is idle."""
        self._sealer.submit(bool).result()

    def lend(self, values: Values) -> HostCopy:
        """Return a copy of the current state, taking one if there is none. It is not overwritten while it has
        borrowers.
        """
        if self._copies and self._copies[-1].step == values.position.step:
            return self._copies[-1]
        copy = self._free()
        copy.fill(self.training, values)
        self._spare.append(copy)
        return copy

    def promote(self, step: int) -> list[int]:
        """Vet the copies that are at least `healthy_steps` steps older than `step`. Returns the steps of newly vetted
        copies."""
        fresh = [copy for copy in self._copies if not copy.vetted and copy.step + self.healthy_steps <= step]
        for copy in fresh:
            copy.vetted = True
            # A copy without a note is still being hashed. The hashing thread writes the note, and then reads `vetted`.
            if copy.slot is not None and copy.slot.note_path.exists():
                copy.slot.vet()
        return [copy.step for copy in fresh]

    def forget_from(self, step: int) -> list[int]:
        """Drop the copies with the update of `step` or a later one. Returns their steps."""
        self._num_rollbacks += 1
        dropped = [copy for copy in self._copies if copy.step >= step]
        self._copies = [copy for copy in self._copies if copy.step < step]
        self._spare += dropped
        for copy in dropped:
            if copy.slot is not None:
                if copy.sealing is not None:
                    copy.sealing.exception()  # waits
                copy.slot.invalidate()
        return [copy.step for copy in dropped]

    def restore(self, before_step: int) -> Values | None:
        """Restore the newest vetted copy from before the update of `before_step`, and drop later copies."""
        candidates = [copy for copy in self._copies if copy.vetted and copy.step < before_step]
        if not candidates:
            return None
        copy = candidates[-1]
        if self._stream is not None:
            self._stream.join()  # wait for running copies: `restore` overwrites the state
        self.forget_from(copy.step + 1)
        return copy.restore(self.training)

    # After a restart.

    def adopt(self, survivor: Survivor) -> None:
        """Load a surviving copy into the training, and drop this rank's other copies."""
        note = survivor.note
        values = survivor.copy.restore(self.training)
        self._remove_former(keep_step=values.position.step)
        # Once this new copy is sealed, `_seal` deletes the former process's copy, too.
        self.take(values, vetted=True, extra=note["extra"], origin=note["origin"])
        self.seal()

    def remove(self, *, at_end: bool = False) -> None:
        """Free the shared memory with its copies. `at_end`: also refuse copies that other nodes still send."""
        if self.peers is not None:
            self.peers.remove(at_end=at_end)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()  # done by the last rank

    def mesh(self) -> dict[str, Any]:
        """The layout. A process can only adopt a copy that has the same layout."""
        training = self.training
        return {
            "sizes": dict(training.plan.sizes),
            "rank": training.rank,
            "model": training.config.model.model_dump(),
            "zero1": training.config.parallel.zero1,
            "compression": training.config.parallel.gradient_compression,
            "optimizer": training.config.optim.name,
        }

    # Pieces of the above.

    def _free(self) -> HostCopy:
        """Return a copy of which nobody reads the buffers.

        Waits if the hashing thread lags behind by more than the number of copies, so that memory stays bounded.
        """
        hashing = [copy.sealing for copy in self._spare if copy.sealing is not None and not copy.sealing.done()]
        if len(hashing) > self._limit:
            hashing[0].exception()
        for copy in self._spare:
            if not copy.in_use:
                self._spare.remove(copy)
                return copy
        slot = None
        if self._folder is not None and not self.problem:
            slot = Slot(self._folder / f"slot-{self._prefix}{self._num_slots}")
            self._num_slots += 1
        copy = HostCopy(slot=slot, stream=self._stream)
        copy.allocate = lambda live: self._allocate(copy, live)
        return copy

    def _allocate(self, copy: HostCopy, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Allocate shared memory if it has space for all copies of all ranks on this node, or else private memory."""
        if copy.slot is not None:
            try:
                copy.slot.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (copy.slot.path.parent / PID_NAME).write_text(str(os.getpid()))
                ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.training.plan.world_size))
                num_missing = max(1, self._limit + 1 - len(self._copies) - len(self._spare))
                duplicates = 2 if self.peers is not None and self.peers.partner is not None else 1
                return copy.slot.allocate(live, share_of=ranks * num_missing * duplicates)
            except OSError as error:
                self.problem = f"{_LOST}: {error}"
                copy.slot.path.unlink(missing_ok=True)
                copy.slot = None
        return private_memory(live)

    def _seal(self, copy: HostCopy, slot: Slot, content: Mapping[str, Any]) -> None:
        copy.wait()
        try:
            slot.seal({**content, "values": copy.values.to_json(), "mesh": self.mesh()}, copy.rng)
            if copy.vetted:
                slot.vet()
                self._remove_former()
        except OSError as error:  # logind's RemoveIPC, for example, removes the files of a user who has logged out
            self.problem = f"{_LOST}: {error}"
            return
        if self.peers is not None:
            copy.sending = self.peers.offer(slot)

    def _remove_former(self, keep_step: int = -1) -> None:
        """Delete this rank's copies left by former processes, except the one of `keep_step`."""
        assert self._folder is not None
        remove_others(self._folder, f"slot-{self._prefix}", keep_step=keep_step)
