"""The recovery of one rank: votes, verdicts, copies of the state and rollbacks, as the training loop calls them.

recovery = Recovery(training, recorder, run, gradients)
position = recovery.start()                             # from the newest checkpoint, or from step 0
sums = StepVotes.from_row(...)                          # `recovery.votes(stop=...)`, summed over all ranks
recovery.apply_votes(sums)                              # once a step: background save, integrity, gradient peaks
if recovery.recompute(position, batch_index): ...       # drop the gradients and train the same batch again
recovery.integrity.after_step(position.step + 1)        # the optimizer has written
position = recovery.taken(position, batch_index)        # after a healthy step: copies, checkpoints, vetting
position = recovery.refuse(verdict, position, batch, loss)         # after a bad step, instead of `taken`
recovery.end(position)
"""

from __future__ import annotations

import os

from probes.collectives.gradients.reduction_inputs import ReductionInputs
from probes.guard.decisions import Guard, GuardPolicy, RunStopped, Verdict
from probes.recorder import Recorder
from probes.tape.files.shared_memory import sweep_stale
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.manifest import StorageError
from trainer.checkpoint.state import Position
from trainer.data.batches import Batch
from trainer.guard.integrity import Integrity
from trainer.guard.ledger_file import LedgerFile
from trainer.guard.recompute_check import RecomputeCheck
from trainer.guard.rollback import Rollback
from trainer.guard.state_copies import StateCopies
from trainer.guard.votes import StepVotes
from trainer.replay.triage import GradientExaminer
from trainer.training.rank_training import Training

__all__ = ["Recovery"]


class Recovery:
    """Guard, copies and checks of one rank. Every method is called on all ranks."""

    def __init__(
        self,
        training: Training,
        recorder: Recorder,
        run: RunDir,
        gradients: GradientExaminer | None,
        reduction_inputs: ReductionInputs | None = None,
    ) -> None:
        self.training = training
        self.config = config = training.config
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sweep_stale(run.path)
        ledger_file = LedgerFile(run.checkpoints, recorder, is_chief=training.rank == 0)
        self.ledger = ledger_file.ledger
        self.guard = Guard(
            self.ledger,
            max_rollbacks=config.recovery.max_rollbacks,
            enabled=config.recovery.enabled,
            policy=GuardPolicy(corruptions_per_device=config.recovery.max_corruptions_per_device),
        )
        self.integrity = Integrity(training, recorder)
        self.recompute_check = RecomputeCheck(training, recorder, self.ledger)
        self.copies = StateCopies(training, recorder, run, ledger_file, self.guard)
        self.rollback = Rollback(
            training, recorder, run, gradients, self.guard, self.integrity, self.copies, reduction_inputs
        )

    def start(self) -> Position:
        """Return the position to start from. Raises CheckpointError if there are checkpoints but none is usable, and
        RunStopped if the guard stopped the run in a former attempt.
        """
        if self.ledger.stopped:
            raise RunStopped(f"stopped by the guard in a former attempt: {self.ledger.stopped}")
        position = self.copies.load()
        if position is None:
            self.training.fill_weights()
            position = Position()
        self._set_rate(position)
        self.integrity.reset(position.step)
        self.copies.keep_first(position)
        if self.config.data.num_workers:
            # A data worker can hang if it is forked while another thread calls a torch operation for the first time:
            # the call registers a destructor under a lock, which glibc's fork does not release in the child.
            self.copies.memory.wait_until_sealed()
        return self._skipping(position)

    def votes(self, *, stop: bool) -> StepVotes:
        """This rank's votes of the step, to be summed over all ranks for `apply_votes`."""
        return StepVotes(
            stop=float(stop),
            integrity=self.integrity.vote(),
            save=self.copies.disk.vote(),
            gradient_peaks=self.recompute_check.vote(),
        )

    def apply_votes(self, sums: StepVotes) -> None:
        """Advance the background save, and check the state. Called once a step with the sums over all ranks."""
        self.recompute_check.observe(sums.gradient_peaks)
        found = self.integrity.judge(sums.integrity)
        if found is not None and self.config.recovery.enabled:
            self.guard.report_corruption(self.integrity.verdict(found))
        self.copies.apply_vote(sums.save)

    def recompute(self, position: Position, batch_index: int) -> bool:
        """Return True if the step must be recomputed before it is judged; its gradients are then dropped.

        Raises RunStopped if a device has corrupted gradients too often.
        """
        step = position.step + 1
        decision = self.recompute_check.decide(step, batch_index)
        if decision.recompute:
            self.training.discard()
        elif decision.suspect_device:
            device = decision.suspect_device
            times = self.ledger.corruptions[device]
            self.copies.ledger_file.save()
            if times >= self.guard.policy.corruptions_per_device:
                reason = f"state or gradients corrupted {times} times on {device}: replace it"
                raise self.rollback.give_up(reason, Verdict(step=step, kind="corruption"))
        return decision.recompute

    def taken(self, position: Position, batch_index: int) -> Position:
        """Called after a healthy step and `integrity.after_step`. Marks the copies that the step confirms as good, and
        starts due saves.
        """
        step = position.step + 1
        position = Position(step=step, batch_index=batch_index + 1)
        self.guard.taken(position, batch_index)
        self.copies.promote(step, self.integrity.trusted_step(step))
        self._set_rate(position)
        self.copies.after_step(position)
        return self._skipping(position)

    def refuse(self, verdict: Verdict, position: Position, batch: Batch, local_loss: float | None) -> Position:
        """Undo a bad step; returns the position from which to continue. Raises RunStopped if the guard ends the run."""
        restored = self.rollback.run(verdict, position, batch, local_loss)
        if self.config.recovery.enabled:
            self._set_rate(restored)
        return self._skipping(restored)

    def end(self, position: Position) -> None:
        """Save the last state, then free the copies in memory. A successful run must have its last state on disk, so
        StorageError is raised if it cannot be saved.
        """
        if not self.copies.save(position):
            raise StorageError(f"{self.copies.disk.folder}: the last state, of step {position.step}, cannot be saved")
        self.copies.memory.remove(at_end=True)

    def _skipping(self, position: Position) -> Position:
        return Position(step=position.step, batch_index=self.ledger.next_batch(position.batch_index))

    def _set_rate(self, position: Position) -> None:
        """Apply a learning rate that the guard has lowered. The configuration is changed, because the rate is a
        function of step and configuration.
        """
        scale = self.ledger.rate_at(position.step + 1)
        optim = self.config.optim
        lowered = optim if scale == 1.0 else optim.model_copy(update={"lr": optim.lr * scale})
        if self.training.config.optim.lr != lowered.lr:
            self.training.config = self.config.model_copy(update={"optim": lowered})
