"""Copies of the training state in memory and on disk: when to make them, which of them are good, and which to restore.

    copies = StateCopies(training, recorder, run, ledger_file, guard)
    position = copies.load()                        # from the newest copy or checkpoint; None if there is none
    copies.promote(step, trusted_step=40)           # after a healthy step: mark older copies as good
    copies.after_step(position)                     # ... and make due copies and saves
    position, tier = copies.restore(before_step=41, position=position)      # after a bad step
    copies.save(position)                           # to disk now, and wait for it

A copy is good once enough healthy steps have followed it. A restore takes the newest good copy in memory, or else
the newest good checkpoint on disk.
"""

from __future__ import annotations

import os
import time
from copy import copy
from typing import Any

from probes.guard.decisions import Guard
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.files.shared_memory import shared_folder
from probes.tape.rundir import RunDir
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.agreement import first_error
from trainer.checkpoint.continuity import data_differs, differing, order_signature, signature
from trainer.checkpoint.disk_tier.checkpoints import DiskCheckpoints
from trainer.checkpoint.disk_tier.loading import Loaded
from trainer.checkpoint.disk_tier.saving import SaveVote
from trainer.checkpoint.memory_tier.copies import MemoryCopies
from trainer.checkpoint.memory_tier.peers import PeerCopies
from trainer.checkpoint.memory_tier.survivors import newest_survivor, remove_unused
from trainer.checkpoint.starting_over import forget_copies, start_over_if_asked
from trainer.checkpoint.state import Position, Values, local_tensors, rng_state, training_tensors
from trainer.guard.ledger_file import LedgerFile
from trainer.training.rank_training import Training

__all__ = ["StateCopies"]


class StateCopies:
    """Both tiers of copies on one rank. Every method is called on all ranks."""

    def __init__(
        self, training: Training, recorder: Recorder, run: RunDir, ledger_file: LedgerFile, guard: Guard
    ) -> None:
        self.training = training
        self.recorder = recorder
        self.run = run
        self.config = config = training.config.checkpoint
        self.ledger_file = ledger_file
        self.ledger = ledger_file.ledger
        self.guard = guard
        self.is_chief = training.rank == 0
        self._recovers = training.config.recovery.enabled
        # A background thread reads this copy while the training reads the original. They must not share one stream,
        # because a stream caches its last lookup.
        self._stream = copy(training.stream)
        self._save_delayed = self._reported_problem = False
        folder = shared_folder(run.path) if config.memory_survives and self._in_memory else None
        several = config.memory_on_peer and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        self.memory = MemoryCopies(
            training,
            healthy_steps=guard.policy.healthy_steps,
            interval=config.memory_interval,
            folder=folder,
            peers=PeerCopies(folder, rank=training.rank) if folder is not None and several else None,
        )
        self.disk = DiskCheckpoints(run.checkpoints, training, recorder, keep=config.keep, keep_every=config.keep_every)

    @property
    def _in_memory(self) -> bool:
        """True if copies are kept in memory."""
        return self._recovers and self.config.memory_interval > 0

    # At the start of an attempt.

    def load(self) -> Position | None:
        """Load the newest usable state; None if there is none, or if the run is started over. Raises CheckpointError if
        there are checkpoints but none is usable.
        """
        self.disk.open()
        if self.memory.peers is not None:
            self.memory.peers.connect()
        if fence.held_attempt() == 0:
            # This is the run's first attempt, so files that exist belong to a deleted run in the same folder.
            self.memory.remove()
        first = start_over_if_asked(self.run, self.recorder, resume=self.config.resume, is_chief=self.is_chief)
        forget_copies(self.memory.folder, before_attempt=first)
        loaded = self._load_newest()
        if loaded is None:
            if self.ledger.good_step is not None:
                self._settle_good_step()  # the checkpoint that the ledger calls good may have been deleted
            return None
        self._adopt(loaded.values)
        self.ledger.adopt(Ledger.from_json(loaded.extra["ledger"]))
        self._settle_good_step()
        self._report_differences(loaded)
        return loaded.values.position

    def _load_newest(self) -> Loaded | None:
        """Load a copy in memory that outlived the processes; if it is older than the newest checkpoint on disk, load
        that checkpoint instead. `trainer.checkpoint.memory_tier.survivors` says which copies can be loaded."""
        memory, disk, rank = self.memory, self.disk, self.training.rank
        found = newest_survivor(
            memory.folder, memory.mesh(), rank, self.training.plan.world_size, memory.peers, self.ledger,
            min_step=max(0, disk.newest(self.ledger)),
        )  # fmt: skip
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
            return disk.load_newest(self.ledger)
        disk.adopt(self.ledger, found.copy.step)
        if self.is_chief:
            self.recorder.event(event_kinds.CHECKPOINT, step=found.copy.step, tier="memory", state="loaded")
        return Loaded(values=found.copy.values, extra=found.note["extra"])

    def keep_first(self, position: Position) -> None:
        """Copy the attempt's initial state, unless it is already in memory."""
        if self._in_memory and position.step not in self.memory.steps:
            # A checkpoint that no healthy step has followed may be bad, so it must be confirmed again.
            self._copy(position, vetted=position.step in (0, self.ledger.good_step))
            self.memory.seal()

    def _adopt(self, values: Values) -> None:
        """Adopt a copy's values other than tensors."""
        self.guard.load(dict(values.detector))
        if self.training.scaler is not None and values.scaler is not None:
            self.training.scaler.load(dict(values.scaler))

    def _report_differences(self, loaded: Loaded) -> None:
        """Record which parts of the loaded state differ from what this rank saved."""
        training = self.training
        parts = ["data"] if data_differs(loaded.extra, training.stream, loaded.values.position) else []
        if loaded.signature:
            found = signature(local_tensors(training_tensors(training)), rng_state(training.device))
            parts += differing(loaded.signature, found)
        if parts:
            self.recorder.event(event_kinds.RESUME_DIFFERS, step=loaded.values.position.step, parts=parts)

    # After a healthy step.

    def promote(self, step: int, trusted_step: int) -> None:
        """Mark copies as good after enough healthy steps, up to the newest trusted state."""
        for copied in self.memory.promote(step):
            self._report_copy(copied, "good")
        newest = self.ledger.good_step or -1
        until = min(step - self.guard.policy.healthy_steps, trusted_step)
        vetted = [saved for saved in self.disk.saved if newest < saved <= until]
        if vetted:
            self.ledger.good_step = vetted[-1]
            self.disk.mark_good(vetted)
            self.ledger_file.save_later(self.disk.background)

    def after_step(self, position: Position) -> None:
        """Make due copies and start a due save."""
        if self._in_memory and position.step % self.config.memory_interval == 0:
            with self.recorder.span("checkpoint"):
                self._copy(position, vetted=False)
        if self.config.interval:
            self._save_if_due(position)
        self.memory.seal()

    def apply_vote(self, sums: SaveVote) -> None:
        """Go to the next stage of the background save if the summed votes say that all ranks are ready for it."""
        if self.disk.advance(sums):
            self.disk.prune(self.ledger.good_step)
        self.ledger_file.report_problem()
        for change in self.memory.peers.state_changes() if self.memory.peers is not None else ():
            self.recorder.event(event_kinds.PEER_COPY, **change)

    def save(self, position: Position) -> bool:
        """Save to disk and wait until this save, and any save in progress, has ended. Returns False if it failed."""
        with self.recorder.span("checkpoint"):
            self.disk.settle()
            if position.step not in self.disk.saved:
                self.start_save(position)
                self.disk.settle()
            self.disk.prune(self.ledger.good_step)
            self.disk.settle()  # waits until files are removed and the ledger is written
        return position.step in self.disk.saved

    def start_save(self, position: Position) -> None:
        """Lend the copy in memory to a save in the background."""
        start = time.monotonic_ns()
        lent = self.memory.lend(self._values(position))
        self.disk.start_save(
            lent,
            self._extra(),
            late_extra=lambda: {"order": order_signature(self._stream, position)},
            stall_ns=time.monotonic_ns() - start,
        )

    def _save_if_due(self, position: Position) -> None:
        """Start a due save in the background, unless another one is still being written."""
        due = position.step % self.config.interval == 0
        if due and self.disk.busy:
            self._save_delayed = True
            if self.is_chief:
                reason = "the previous save is still being written"
                self.recorder.event(event_kinds.CHECKPOINT, tier="disk", state="delayed", reason=reason)
        elif not self.config.asynchronous and due:
            self.save(position)
        elif due or (self._save_delayed and not self.disk.busy):
            self._save_delayed = False
            with self.recorder.span("checkpoint"):
                self.start_save(position)
        elif not self.disk.is_planned:
            with self.recorder.span("checkpoint"):
                self.disk.prepare()  # torch's planning is collective: do it in the first step, not during a save

    def _values(self, position: Position) -> Values:
        scaler = self.training.scaler
        return Values(position=position, scaler=scaler.state() if scaler else None, detector=self.guard.state())

    def _extra(self) -> dict[str, Any]:
        return {"ledger": self.ledger.to_json(), "corpus": self._stream.corpus.digest}

    def _copy(self, position: Position, *, vetted: bool) -> None:
        start = time.monotonic_ns()
        size = self.memory.take(self._values(position), vetted=vetted, extra=self._extra())
        took = time.monotonic_ns() - start
        if self.memory.problem and not self._reported_problem:
            self._reported_problem = True
            self._report_copy(position.step, "failed", reason=self.memory.problem)
        self._report_copy(position.step, "good" if vetted else "complete", bytes=size, duration_ns=took, stall_ns=took)

    def _report_copy(self, step: int, state: str, **detail: Any) -> None:
        if self.is_chief:
            self.recorder.event(event_kinds.CHECKPOINT, step=step, tier="memory", state=state, **detail)

    # After a bad step.

    def restore(self, before_step: int, position: Position) -> tuple[Position, str]:
        """Restore the newest good state from before a step. Returns the position of the state, and its tier (memory or
        disk).

        Without a good state, the position is unchanged, and the tier is "none".
        """
        values, tier = self.memory.restore(before_step), "memory"
        if values is None:
            values, tier = self._from_disk(before_step), "disk"
        if values is None:
            self.guard.on_rollback(position.step)
            return position, "none"
        restored = values.position
        # Checkpoints after that state were not confirmed in time, or already include the bad update.
        self.disk.condemn_from(restored.step + 1, f"saved after the state of step {restored.step}, which was restored")
        self._save_delayed = False
        self._settle_good_step()
        self._adopt(values)
        self.guard.on_rollback(restored.step)
        if tier == "disk" and self._in_memory:
            self.memory.forget_from(0)
            self._copy(restored, vetted=restored.step == self.ledger.good_step)
            self.memory.seal()
        return restored, tier

    def _from_disk(self, before_step: int) -> Values | None:
        """Load the newest good checkpoint before a step; if none is good yet, the newest complete one."""
        self.disk.settle()
        good = self.ledger.good_step
        while steps := [step for step in self.disk.saved if step < before_step]:
            step = good if good in steps else steps[-1]
            loaded = self.disk.load(step)
            if loaded is not None:
                return loaded.values
        return None

    def _settle_good_step(self) -> None:
        """If the known good checkpoint is gone, use the newest older checkpoint, which is also good."""
        good = self.ledger.good_step
        if good is not None and good not in self.disk.saved:
            self.ledger.good_step = max((step for step in self.disk.saved if step < good), default=None)
        self.ledger_file.save()
