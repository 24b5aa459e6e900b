"""Keeps copies of the training's state, and goes back to the last good one when a step is bad.

    recovery = Recovery(training, recorder, run, gradients)
    position = recovery.start()                             # from the newest checkpoint, or from the beginning
    position = recovery.taken(position, batch_index)        # after a healthy step: copies, checkpoints, vetting
    position = recovery.refuse(verdict, position, batch, loss)         # instead of a bad one
    recovery.counted(sums)      # once a step: what all ranks' `votes()` sum up to, for saves in the background

After a rollback the steps are trained again with the same batches less the skipped ones. Model, optimizer, loss
scale, random generators and the spike detector's history go back together, the set of skipped batches does not: what
follows is, bit for bit, the run that never held those batches. A refused step is replayed before and after the way
back, to see whether the fault comes back (`trainer.replay.triage`).

Order in `refuse`: the decision is on the disk before anything is restored. Killed at any point in between, the run
resumes from a checkpoint with the batch skipped, or meets the batch again and decides the same.
"""

from __future__ import annotations

import json
import math
import os
import time
from copy import copy
from typing import Any

from probes.guard.decisions import Decision, Guard, GuardPolicy, RunStopped, Verdict
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from probes.tape.rundir import RunDir
from probes.tape.shared_memory import shared_folder, sweep_stale
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.continuity import differing, order_signature, signature
from trainer.checkpoint.disk_tier.checkpoints import DiskCheckpoints
from trainer.checkpoint.disk_tier.loading import Loaded
from trainer.checkpoint.memory_tier.copies import MemoryCopies
from trainer.checkpoint.memory_tier.peers import PeerCopies
from trainer.checkpoint.memory_tier.survivors import remove_unused
from trainer.checkpoint.newest import load_newest
from trainer.checkpoint.state import Position, Values, local_tensors, rng_state, training_tensors
from trainer.data.batches import Batch
from trainer.guard.integrity import NUM_VOTES, Integrity
from trainer.guard.ledger_file import LedgerFile
from trainer.guard.recompute_check import SecondLook
from trainer.replay.triage import GradientExaminer, Triage
from trainer.training.rank_training import Training

__all__ = ["Recovery"]


class Recovery:
    """State, copies and guard of one rank. Every method is called on all ranks alike."""

    def __init__(self, training: Training, recorder: Recorder, run: RunDir, gradients: GradientExaminer | None) -> None:
        config = training.config
        self.training = training
        self.recorder = recorder
        self.gradients = gradients
        self.config = config
        self.run = run
        self.is_chief = training.rank == 0
        self._stream = copy(training.stream)  # read in the background: a stream keeps what it looked up last
        self._delayed = self._told_problem = False
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sweep_stale()
        self.ledger_file = LedgerFile(run.checkpoints, recorder, is_chief=self.is_chief)
        self.ledger = self.ledger_file.ledger
        recovery = config.recovery
        policy = GuardPolicy(corruptions_per_device=recovery.max_corruptions_per_device)
        self.guard = Guard(self.ledger, max_rollbacks=recovery.max_rollbacks, enabled=recovery.enabled, policy=policy)
        self.integrity = Integrity(training, recorder)
        self.second_look = SecondLook(training, recorder, self.ledger)
        self.triage = Triage(training, recorder, gradients, limit=config.recovery.max_replays)
        healthy = self.guard.policy.healthy_steps
        interval = config.checkpoint.memory_interval
        folder = shared_folder(run.path) if config.checkpoint.memory_survives and self._keeps_copies else None
        several = config.checkpoint.memory_on_peer and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        peers = PeerCopies(folder, rank=training.rank) if folder is not None and several else None
        self.memory = MemoryCopies(training, healthy_steps=healthy, interval=interval, folder=folder, peers=peers)
        self.disk = DiskCheckpoints(
            run.checkpoints, training, recorder, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every
        )

    def start(self) -> Position:
        """Where to begin. Raises CheckpointError if there are checkpoints and none can be used, RunStopped if a
        former attempt was given up."""
        if self.ledger.stopped:
            raise RunStopped(f"stopped by the guard in a former attempt: {self.ledger.stopped}")
        self.disk.open()
        if self.memory.peers is not None:
            self.memory.peers.connect()
        loaded = None
        if fence.held_attempt() == 0:
            # Nothing of this run can have survived: what lies there is of one that had the same folder and was deleted.
            self.memory.remove()
        if self.config.checkpoint.resume:
            loaded = load_newest(self.memory, self.disk, self.ledger)
        else:
            self.memory.remove()
            remove_unused(self.memory.folder, self.memory.peers, self.training.rank)
        position = self._adopt(loaded) if loaded else Position()
        if loaded:
            self._compare(loaded)
        self._set_rate(position)
        self.integrity.begin(position.step)
        if self._keeps_copies and position.step not in self.memory.steps:
            # A checkpoint that no healthy step has followed may be poisoned: it has to prove itself again.
            self._copy(position, vetted=position.step in (0, self.ledger.good_step))
            self.memory.seal()
        return self._skipping(position)

    def taken(self, position: Position, batch_index: int) -> Position:
        """A healthy step's update was taken: vet what it vouches for, and save what is due."""
        step = position.step + 1
        position = Position(step=step, batch_index=batch_index + 1)
        self.integrity.after_step(step)
        self.guard.taken(position, batch_index)
        self._promote(step)
        self._set_rate(position)
        checkpoint = self.config.checkpoint
        if self._keeps_copies and step % checkpoint.memory_interval == 0:
            with self.recorder.span("checkpoint"):
                self._copy(position, vetted=False)
        if checkpoint.interval:
            self._save_if_due(position)
        self.memory.seal()
        return self._skipping(position)

    def votes(self) -> list[float]:
        """This rank's part of what `counted` wants summed over all ranks: always as many numbers."""
        return [*self.integrity.votes(), *self.disk.votes(), *self.second_look.votes()]

    def counted(self, sums: list[float]) -> None:
        """Once a step, with the sums of its reduction: go on with the save in the background, and look at the bits."""
        self.second_look.counted(sums[len(sums) - self.second_look.num_votes :])
        found = self.integrity.counted(sums[:NUM_VOTES])
        if found is not None and self.config.recovery.enabled:
            self.guard.corruption = self.integrity.verdict(found)
        if self.disk.counted(sums[NUM_VOTES:]):
            self.disk.prune(self.ledger.good_step)
        self.ledger_file.tell_problem()
        for news in self.memory.peers.news() if self.memory.peers is not None else ():
            self.recorder.event("peer_copy", **news)

    def save(self, position: Position) -> bool:
        """Save to disk now and wait for it, as for one that is being written already; False if that failed."""
        with self.recorder.span("checkpoint"):
            self.disk.settle()
            if position.step not in self.disk.saved:
                self._begin_save(position)
                self.disk.settle()
            self.disk.prune(self.ledger.good_step)
            self.disk.settle()  # what was removed, and the ledger
        return position.step in self.disk.saved

    def end(self, position: Position) -> None:
        """Save the last state, and leave nothing in memory unless that failed. The run needs no recovery any more."""
        if self.save(position):
            self.memory.remove()

    def computes_again(self, position: Position, batch_index: int) -> bool:
        """Whether the step is to be computed once more before it is judged; its gradients are dropped then. Raises
        RunStopped when a device has changed gradients too often."""
        if self.second_look.wanted(position.step + 1, batch_index):
            self.training.discard()
            return True
        device, self.second_look.worn = self.second_look.worn, ""
        if device:
            times = self.ledger.corruptions[device]
            self.ledger_file.save()
            if times >= self.guard.policy.corruptions_per_device:
                stopped = self.guard.give_up(f"state or gradients corrupted {times} times on {device}, take it out")
                self._give_up(str(stopped), Verdict(step=position.step + 1, kind="corruption"))
                raise stopped
        return False

    def refuse(self, verdict: Verdict, position: Position, batch: Batch, local_loss: float | None) -> Position:
        """Drop a bad step's gradients, skip what caused it, go back. Raises RunStopped when enough is enough."""
        start = time.monotonic()
        if verdict.kind == "non_finite":
            self._tell_nonfinite(verdict, local_loss)
        if verdict.kind != "corruption" and self.config.recovery.enabled:
            # A NaN or a spike may come from a flipped bit: then its batch is not to blame.
            found = self.integrity.examine()
            verdict = self.integrity.verdict(found) if found is not None else verdict
        self.training.discard()
        repeated = self.triage.repeat(verdict, batch)
        try:
            decision = self.guard.decide(verdict, position.batch_index)
        except RunStopped as stopped:
            self.integrity.tell_devices(verdict, self.ledger)
            self._give_up(str(stopped), verdict)
            raise
        self.integrity.tell_devices(verdict, self.ledger)
        fresh = [number for number in decision.batches if self.ledger.skip(number, verdict.reason)]
        self.ledger.rollbacks += self.config.recovery.enabled
        self.ledger_file.save()
        if self.is_chief:
            for number in fresh:
                self.recorder.event("batch_skipped", batch_index=number, reason=verdict.reason)
        if not self.config.recovery.enabled:
            return self._skipping(position)
        with self.recorder.span("rollback"):
            restored, tier = self._go_back(decision, position)
            if tier == "none" and verdict.kind == "corruption":
                stopped = self.guard.give_up(f"no copy from before the corruption is left: {verdict.reason}")
                self._give_up(str(stopped), verdict)
                raise stopped
        self.integrity.begin(restored.step)
        self._set_rate(restored)
        took = time.monotonic() - start
        self.triage.from_restored(repeated, batch, state_step=restored.step)
        if self.is_chief:
            self.recorder.event(
                "rollback",
                from_step=verdict.step,
                to_step=restored.step,
                tier=tier,
                verdict=verdict.kind,
                reason=verdict.reason,
                skipped_batches=fresh,
                duration_s=took - (repeated.duration_s if repeated else 0.0),
                failures=self.ledger.failures,
                rate_scale=decision.rate_scale,
            )
        return self._skipping(restored)

    # Going back.

    def _go_back(self, decision: Decision, position: Position) -> tuple[Position, str]:
        """Memory first, then disk; without either the refused step alone is undone, which `discard` has done."""
        values, tier = self.memory.restore(decision.before_step), "memory"
        if values is None:
            values, tier = self._from_disk(decision.before_step), "disk"
        if values is None:
            self.guard.went_back(position.step)
            return position, "none"
        back = values.position
        # Whatever was saved after that state was not vetted when it mattered, or is from the poison on.
        self.disk.condemn_from(back.step + 1, f"saved after the state of step {back.step}, which was gone back to")
        self._delayed = False
        self._settle_good_step()
        self.guard.load(dict(values.detector))
        self.guard.went_back(back.step)
        if self.training.scaler is not None and values.scaler is not None:
            self.training.scaler.load(dict(values.scaler))
        if tier == "disk" and self._keeps_copies:
            self.memory.forget_from(0)
            self._copy(back, vetted=back.step == self.ledger.good_step)
            self.memory.seal()
        return back, tier

    def _from_disk(self, before_step: int) -> Values | None:
        """The newest good checkpoint from before a step; if none is good yet, the newest that is whole."""
        self.disk.settle()
        good = self.ledger.good_step
        while steps := [step for step in self.disk.saved if step < before_step]:
            step = good if good in steps else steps[-1]
            loaded = self.disk.load(step)
            if loaded is not None:
                return loaded.values
        return None

    def _adopt(self, loaded: Loaded) -> Position:
        """Take over what a checkpoint holds besides tensors."""
        values = loaded.values
        self.guard.load(dict(values.detector))
        if self.training.scaler is not None and values.scaler is not None:
            self.training.scaler.load(dict(values.scaler))
        self.ledger.adopt(Ledger.from_json(loaded.extra["ledger"]))
        self._settle_good_step()
        return values.position

    def _compare(self, loaded: Loaded) -> None:
        """Tell what this rank goes on with that is not what it saved."""
        training = self.training
        found: dict[str, Any] = {"data": order_signature(training.stream, loaded.values.position)}
        if loaded.signature:
            found |= signature(local_tensors(training_tensors(training)), rng_state(training.device))
        parts = differing({"data": loaded.extra.get("order"), **loaded.signature}, found)
        if parts:
            self.recorder.event("resume_differs", step=loaded.values.position.step, parts=parts)

    # Copies.

    @property
    def _keeps_copies(self) -> bool:
        return self.config.recovery.enabled and self.config.checkpoint.memory_interval > 0

    def _values(self, position: Position) -> Values:
        scaler = self.training.scaler
        return Values(position=position, scaler=scaler.state() if scaler else None, detector=self.guard.state())

    def _save_if_due(self, position: Position) -> None:
        """Begin to save in the background; as long as another save is being written there, this one waits."""
        checkpoint = self.config.checkpoint
        due = position.step % checkpoint.interval == 0
        if due and self.disk.busy:
            self._delayed = True
            if self.is_chief:
                reason = "the save before it is still being written"
                self.recorder.event("checkpoint", tier="disk", state="delayed", reason=reason)
        elif not checkpoint.asynchronous and due:
            self.save(position)
        elif due or (self._delayed and not self.disk.busy):
            self._delayed = False
            with self.recorder.span("checkpoint"):
                self._begin_save(position)
        elif not self.disk.is_planned:
            with self.recorder.span("checkpoint"):
                self.disk.prepare()  # torch's planning is collective: rather in the first step than in a save

    def _begin_save(self, position: Position) -> None:
        start = time.monotonic_ns()
        lent = self.memory.lend(self._values(position))
        self.disk.begin(
            lent,
            {"ledger": self.ledger.to_json()},
            late_extra=lambda: {"order": order_signature(self._stream, position)},
            stall_ns=time.monotonic_ns() - start,
        )

    def _copy(self, position: Position, *, vetted: bool) -> None:
        start = time.monotonic_ns()
        size = self.memory.take(self._values(position), vetted=vetted, extra={"ledger": self.ledger.to_json()})
        took = time.monotonic_ns() - start
        if self.memory.problem and not self._told_problem:
            self._told_problem = True
            self._tell_copy(position.step, "failed", reason=self.memory.problem)
        self._tell_copy(position.step, "good" if vetted else "complete", bytes=size, duration_ns=took, stall_ns=took)

    def _promote(self, step: int) -> None:
        for copied in self.memory.promote(step):
            self._tell_copy(copied, "good")
        newest = self.ledger.good_step or -1
        until = min(step - self.guard.policy.healthy_steps, self.integrity.trusted_step(step))
        vetted = [saved for saved in self.disk.saved if newest < saved <= until]
        if vetted:
            self.ledger.good_step = vetted[-1]
            self.disk.mark_good(vetted)
            self.ledger_file.save_later(self.disk.background)

    def _settle_good_step(self) -> None:
        """The checkpoint known to be good may be gone; whatever is older and still there was good before it."""
        good = self.ledger.good_step
        if good is not None and good not in self.disk.saved:
            self.ledger.good_step = max((step for step in self.disk.saved if step < good), default=None)
        self.ledger_file.save()

    def _tell_copy(self, step: int, state: str, **detail: Any) -> None:
        if self.is_chief:
            self.recorder.event("checkpoint", step=step, tier="memory", state=state, **detail)

    def _skipping(self, position: Position) -> Position:
        return Position(step=position.step, batch_index=self.ledger.next_batch(position.batch_index))

    def _set_rate(self, position: Position) -> None:
        """The rate is a function of step and configuration, so a lowered one is a configuration of its own."""
        scale = self.ledger.rate_at(position.step + 1)
        optim = self.config.optim
        lowered = optim if scale == 1.0 else optim.model_copy(update={"lr": optim.lr * scale})
        if self.training.config.optim.lr != lowered.lr:
            self.training.config = self.config.model_copy(update={"optim": lowered})

    # Telling.

    def _tell_nonfinite(self, verdict: Verdict, local_loss: float | None) -> None:
        """What this rank sees: a loss of its own that is not finite, and its gradients, which the reduction has
        spread; who had it first is in the records of the collectives."""
        found = self.gradients.examine(verdict.step) if self.gradients is not None else []
        phase = "backward" if local_loss is None or math.isfinite(local_loss) else "forward"
        count = sum(number for _, number in found)
        self.recorder.event(
            "nonfinite",
            step=verdict.step,
            phase=phase,
            parameters=[name for name, _ in found],
            local_loss=local_loss,
            local_nonfinite_count=count,
        )
        if self.gradients is not None:
            self.recorder.log(nonfinite_count=count)

    def _give_up(self, reason: str, verdict: Verdict) -> None:
        self.ledger_file.save()
        if self.is_chief:
            self.recorder.event("run_stopped", reason=reason)
            report = {"reason": reason, "step": verdict.step, "kind": verdict.kind, "ledger": self.ledger.to_json()}
            self.run.reports.mkdir(exist_ok=True)
            (self.run.reports / "guard-stop.json").write_text(json.dumps(report, indent=2) + "\n")
