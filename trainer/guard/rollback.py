"""Roll the training back after a bad step: record the cause, skip its batch, restore the last good state.

    rollback = Rollback(training, recorder, run, gradients, guard, integrity, copies)
    position = rollback.run(verdict, position, batch, local_loss)
    raise rollback.give_up("...", verdict)          # end the run with a report

The run goes back to the newest good copy before `Decision.before_step` (`StateCopies.restore`), and repeats the steps
from there with the same batches, except skipped ones. Model, optimizer, loss scale, random generators and the spike
detector's history are restored together. The set of skipped batches is not restored, so the run continues bitwise like
one that never had these batches. A refused step is replayed before and after the rollback, to see if the fault recurs
(`trainer.replay.triage`). If it does not, the batch is not the cause: it is trained again after the rollback, and
skipped only if it fails again.

The decision is written to disk before anything is restored. A run that is killed in between resumes from a checkpoint
and skips the batch, or reaches the batch again and makes the same decision.
"""

from __future__ import annotations

import contextlib
import json
import math
import time

from probes.collectives.gradients.reduction_inputs import ReductionInputs
from probes.guard.decisions import Guard, RunStopped, Verdict
from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.rundir import RunDir
from trainer.checkpoint.state import Position
from trainer.data.batches import Batch
from trainer.guard.integrity import Integrity
from trainer.guard.state_copies import StateCopies
from trainer.replay.triage import GradientExaminer, Triage
from trainer.training.rank_training import Training

__all__ = ["Rollback"]

TO_GO_ON = "Fix the cause, which `rankscope analyze` names; then run `rankscope train --resume RUN --force`."


class Rollback:
    """Rollback on one rank; every method is called on all ranks."""

    def __init__(
        self,
        training: Training,
        recorder: Recorder,
        run: RunDir,
        gradients: GradientExaminer | None,
        guard: Guard,
        integrity: Integrity,
        copies: StateCopies,
        reduction_inputs: ReductionInputs | None = None,
    ) -> None:
        self.training = training
        self.recorder = recorder
        self.run_dir = run
        self.gradients = gradients
        self.guard = guard
        self.integrity = integrity
        self.copies = copies
        self.reduction_inputs = reduction_inputs
        self.ledger = copies.ledger
        self.enabled = training.config.recovery.enabled
        self.triage = Triage(training, recorder, gradients, limit=training.config.recovery.max_replays)
        self.is_chief = training.rank == 0

    def run(self, verdict: Verdict, position: Position, batch: Batch, local_loss: float | None) -> Position:
        """Drop a bad step's gradients, skip its cause, and restore a good state; returns the position from which to
        continue. Raises RunStopped if the guard's policy ends the run.
        """
        start = time.monotonic()
        if verdict.kind == "non_finite":
            self._report_nonfinite(verdict, local_loss)
        if verdict.kind != "corruption" and self.enabled:
            # A NaN or a spike may be caused by a flipped bit, and not by its batch.
            found = self.integrity.examine()
            verdict = self.integrity.verdict(found) if found is not None else verdict
        self.training.discard()
        repeated = self.triage.repeat(verdict, batch)
        try:
            is_transient = repeated is not None and not repeated.came_back
            decision = self.guard.decide(verdict, position.batch_index, is_transient=is_transient)
        except RunStopped as stopped:
            self.integrity.report_suspect_devices(verdict, self.ledger)
            self._report_stop(str(stopped), verdict)
            raise RunStopped(f"{stopped}. {TO_GO_ON}") from None
        self.integrity.report_suspect_devices(verdict, self.ledger)
        skipped = [number for number in decision.batches if self.ledger.skip(number, verdict.reason)]
        self.ledger.rollbacks += self.enabled
        self.copies.ledger_file.save()
        if self.is_chief:
            for number in skipped:
                self.recorder.event(event_kinds.BATCH_SKIPPED, batch_index=number, reason=verdict.reason)
        if not self.enabled:
            return position
        with self.recorder.span("rollback"):
            # Without a copy only the refused step is undone, which `discard` has done.
            restored, tier = self.copies.restore(decision.before_step, position)
            if tier == "none" and verdict.kind == "corruption":
                raise self.give_up(f"no copy from before the corruption is left: {verdict.reason}", verdict)
        self.integrity.reset(restored.step)
        took = time.monotonic() - start
        self.triage.from_restored(repeated, batch, state_step=restored.step)
        if self.is_chief:
            self.recorder.event(
                event_kinds.ROLLBACK,
                from_step=verdict.step,
                to_step=restored.step,
                tier=tier,
                verdict=verdict.kind,
                reason=verdict.reason,
                skipped_batches=skipped,
                replayed_batches=[] if decision.batches or not is_transient else [position.batch_index],
                duration_s=took - (repeated.duration_s if repeated else 0.0),
                failures=self.ledger.failures,
                rate_scale=decision.rate_scale,
            )
        return restored

    def give_up(self, reason: str, verdict: Verdict) -> RunStopped:
        """Prepare to end the run for a reason outside the guard's policy; returns the exception to raise."""
        stopped = self.guard.give_up(reason)
        self._report_stop(str(stopped), verdict)
        return RunStopped(f"{stopped}. {TO_GO_ON}")

    def _report_stop(self, reason: str, verdict: Verdict) -> None:
        self.copies.ledger_file.save()
        if self.is_chief:
            self.recorder.event(event_kinds.RUN_STOPPED, reason=reason)
            report = {"reason": reason, "step": verdict.step, "kind": verdict.kind, "ledger": self.ledger.to_json()}
            with contextlib.suppress(OSError):  # even with a full disk the run must end with its reason and exit code
                self.run_dir.reports.mkdir(exist_ok=True)
                (self.run_dir.reports / "guard-stop.json").write_text(json.dumps(report, indent=2) + "\n")

    def _report_nonfinite(self, verdict: Verdict, local_loss: float | None) -> None:
        """Record what this rank saw: whether its local loss was finite, whether its gradients were finite before the
        reduction (if this is known), and which gradients are not finite after the reduction. The reduction spreads a
        NaN to all ranks. On the host, the records of the collectives also show which rank had the NaN first.
        """
        own = self.reduction_inputs.nonfinite(verdict.step) if self.reduction_inputs is not None else None
        found = self.gradients.examine(verdict.step) if self.gradients is not None else []
        phase = "backward" if local_loss is None or math.isfinite(local_loss) else "forward"
        count = sum(number for _, number in found)
        self.recorder.event(
            event_kinds.NONFINITE,
            step=verdict.step,
            phase=phase,
            parameters=[name for name, _ in found],
            local_loss=local_loss,
            local_nonfinite_count=count,
            own_gradient_nonfinite=own,
        )
        if self.gradients is not None:
            self.recorder.log(nonfinite_count=count)
