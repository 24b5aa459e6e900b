"""Checkpoints on disk: sharded, hashed, published by one rename, written in the background.

    disk = DiskCheckpoints(run.checkpoints, training, recorder, keep=3)
    disk.open(); loaded = disk.load_newest(ledger)      # all ranks; None without a checkpoint
    disk.start_save(copy, extra={"ledger": {...}})      # all ranks; returns immediately
    disk.advance(sums)                                  # all ranks, once a step, with the sums of `disk.vote()`
    disk.settle()                                       # all ranks: wait for the save in progress

Saving: while a folder is written, its name is `step-00000050.1.a0.tmp` (save 1, attempt 0). Its manifest is
written last, then one rename gives it its final name; `trainer.checkpoint.disk_tier.saving` has the stages. Only one
save is written at a time. A folder that must not be used again is renamed to `step-00000050.condemned`.

Loading: all hashes are verified before torch opens any file (`trainer.checkpoint.disk_tier.loading`). If a file does
not match its hash, the next older checkpoint is used. Unreadable storage does not prove damage: it raises StorageError,
and nothing is removed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from probes.fail_open import failing_open
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from probes.tape import event_kinds
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.agreement import first_error, from_rank_0, summed
from trainer.checkpoint.disk_tier.condemned import condemned_as_damaged, note_reason
from trainer.checkpoint.disk_tier.listing import STEP_NAME, checkpoint_steps
from trainer.checkpoint.disk_tier.loading import Loaded, load_folder
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError, read_manifest
from trainer.checkpoint.disk_tier.save_plan import Layout, SavePlan, layout_of
from trainer.checkpoint.disk_tier.saving import Save, SaveVote, older_of, recover_older
from trainer.checkpoint.lifecycle import States
from trainer.checkpoint.memory_tier.host_copy import HostCopy
from trainer.checkpoint.state import Values, local_tensors, rng_state, training_tensors
from trainer.training.rank_training import Training

__all__ = ["DiskCheckpoints", "checkpoint_steps"]

_T = TypeVar("_T")
SWITCH_INTERVAL_S = 0.0005
"""GIL switch interval while savers run in the background."""


class DiskCheckpoints:
    """The checkpoints of a run. Methods marked "all ranks" are collective; rank 0 renames and removes."""

    def __init__(self, folder: Path, training: Training, recorder: Recorder, *, keep: int, keep_every: int = 0) -> None:
        self.folder = folder
        self.training = training
        self.recorder = recorder
        self.keep = keep
        self.keep_every = keep_every
        self.is_chief = training.rank == 0
        self.saved: list[int] = []
        """Steps of the verified checkpoints that this run may restore, oldest first. All ranks have the same list."""
        self.unread: set[int] = set()
        """Steps with files that are complete but could not be read back. They are verified when they are loaded. The
        same on all ranks."""
        self.states = States()
        """Maintained by rank 0 only."""
        self.background = ThreadPoolExecutor(1, thread_name_prefix="rankscope-save")
        """Runs background tasks one at a time; none of them may be collective."""
        # A thread that pickles holds the GIL for a whole switch interval. The training thread releases the GIL in each
        # operation, and would wait the default 5 ms to get it back each time.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._save: Save | None = None
        self._plan: SavePlan | None = None
        self._planned: Layout = {}
        self._num_saves = 0

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # Saving.

    @property
    def busy(self) -> bool:
        """True while a save is in progress; the same on all ranks."""
        return self._save is not None

    @property
    def is_planned(self) -> bool:
        """True once the shards of a save are assigned to ranks; the same on all ranks."""
        return self._plan is not None

    def prepare(self) -> None:
        """Assign the shards of a save to ranks. All ranks; collective."""
        tensors = training_tensors(self.training)
        rng = {f"rng.{self.training.rank}.{name}": value for name, value in rng_state(self.training.device).items()}
        self._plan = SavePlan.make(tensors | rng, rank=self.training.rank)
        self._planned = layout_of(local_tensors(tensors))

    def start_save(
        self,
        copy: HostCopy,
        extra: Mapping[str, Any],
        *,
        late_extra: Callable[[], Mapping[str, Any]] = dict,
        stall_ns: int = 0,
    ) -> None:
        """Start writing a checkpoint of the state in `copy`. All ranks; not while `busy`. `stall_ns` is recorded.

        `late_extra` is called in the background on rank 0, for values that take long to compute."""
        assert self._save is None
        start = time.monotonic_ns()
        # Names and shapes rarely change, e.g. when the optimizer state is allocated, and always on all ranks at once.
        if self._plan is None or self._planned != layout_of(copy.tensors):
            self.prepare()
        assert self._plan is not None
        values, step = copy.values, copy.step
        self._num_saves += 1
        final = self.path(step)
        if step in self.unread:  # the unverified checkpoint of this step stays until the new one has been verified
            self.states.found(step, "failed")
        self._report(step, "writing")
        content = self._content(values)
        self._save = Save(
            step=step,
            final=final,
            scratch=fence.scratch(final.with_name(f"{final.name}.{self._num_saves}")),
            plan=self._plan,
            copy=copy,
            manifest=lambda: content | {"extra": {**extra, **late_extra()}},
            executor=self.background,
        )
        self._save.submit()
        self._save.stall_ns = stall_ns + time.monotonic_ns() - start

    def vote(self) -> SaveVote:
        """This rank's vote on the current save."""
        return self._save.vote() if self._save is not None else SaveVote()

    def advance(self, sums: SaveVote) -> bool:
        """Advance the save by the votes of all ranks; returns True once it has succeeded. All ranks."""
        save = self._save
        if save is None or sums.pending:
            return False
        if save.cancelled or sums.failed:
            self._abort_save(save)
            return False
        if self.is_chief and save.stage != "write":
            self._report(
                save.step,
                "complete" if save.stage == "finish" else "verified",
                duration_ns=time.monotonic_ns() - save.start_ns,
                stall_ns=save.stall_ns,
                bytes=save.nbytes,
            )
        if not save.is_last_stage:
            save.submit()
            return False
        self._save = None
        self.unread.discard(save.step)
        self.saved.append(save.step)
        if save.older is not None:
            self._discard(save.older)
        return True

    def settle(self) -> bool:
        """Wait for the current save and other background work. All ranks; collective. True if a save succeeded."""
        ended = False
        while (save := self._save) is not None:
            start = time.monotonic_ns()
            save.wait()
            sums = SaveVote(*summed(self.vote(), self.training.device))
            save.stall_ns += time.monotonic_ns() - start
            ended = self.advance(sums)
        self.background.submit(bool).result()
        return ended

    # Loading.

    def open(self) -> None:
        """Remove unfinished folders of earlier attempts, and recover the checkpoints that they were replacing. All
        ranks, before loading."""
        if self.is_chief:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                fence.sweep(self.folder)
                recover_older(self.folder)
            except OSError as failure:  # a read-only folder must not keep a run from training
                self._report_problem(f"{self.folder.name} cannot be written: {failure.strerror}")

    def newest(self, ledger: Ledger) -> int:
        """Step of the newest finished checkpoint that contains no update of a batch skipped later; -1 if there is
        none. All ranks."""
        steps, stale = self._scan(ledger)
        return max((step for step in steps if step not in stale), default=-1)

    def load_newest(self, ledger: Ledger) -> Loaded | None:
        """Load the newest checkpoint with matching hashes. Newer ones with other hashes are condemned. All ranks.

        A checkpoint with the update of a batch that was skipped later is also condemned, because the run ended before
        it could roll back. Raises CheckpointError if checkpoints exist but none is usable (the user must start over
        explicitly), StorageError, LoadError."""
        steps, stale = self._scan(ledger)
        candidates = [step for step in steps if step not in stale] or steps
        for step in reversed(candidates):
            loaded = self.load(step)
            if loaded is None:
                continue
            self.saved = [older for older in steps if older <= step and older not in stale]
            for newer in [newer for newer in steps if newer > step and newer not in candidates]:
                self.condemn(newer, f"it contains the update of a batch that was skipped later; step {step} was loaded")
            return loaded
        if steps:
            raise CheckpointError(
                f"{self.folder}: none of {len(steps)} checkpoints can be used. "
                "To start over, set checkpoint.resume=false."
            )
        if damaged := self._from_disk(lambda: condemned_as_damaged(self.folder)):
            raise CheckpointError(
                f"{self.folder}: every checkpoint was condemned as damaged ({', '.join(damaged)}). "
                "If the disk was at fault, rename one back; to start over, set checkpoint.resume=false."
            )
        return None

    def adopt(self, ledger: Ledger, before: int) -> None:
        """Use the existing checkpoints up to step `before` without loading any. All ranks."""
        steps, stale = self._scan(ledger)
        self.saved = [step for step in steps if step <= before and step not in stale]
        for step in stale:
            self.condemn(step, "it contains the update of a batch that was skipped later")

    def load(self, step: int) -> Loaded | None:
        """Load one checkpoint; if its hashes do not match, condemn it and return None. All ranks. Raises StorageError,
        LoadError."""
        try:
            loaded = load_folder(self.path(step), self.training)
        except CheckpointError as error:
            self.condemn(step, str(error), is_damaged=True)
            return None
        if self.states.of(step) == "complete":
            self._report(step, "verified", reason="its hashes agree when it is loaded")
        self._report(step, "loaded")
        return loaded

    # Lifecycle of saved checkpoints.

    def condemn(self, step: int, reason: str, *, is_damaged: bool = False) -> None:
        """Never use a checkpoint again, even if it is still being written. All ranks. The folder is renamed and kept
        until it is pruned. `is_damaged`: True if its files are damaged, False if its training state is bad."""
        self.saved = [other for other in self.saved if other != step]
        self.unread.discard(step)
        if self._save is not None and self._save.step == step:
            self._save.cancel()
        self._report(step, "condemned", reason=reason)
        if self.is_chief:
            path = self.path(step)
            target = path.with_name(path.name + ".condemned")
            with contextlib.suppress(OSError):
                self._discard(older_of(path))  # otherwise the next attempt would recover it
                self._discard(target)  # also checks the fence
                path.rename(target)
                note_reason(target, reason, is_damaged=is_damaged)

    def condemn_from(self, step: int, reason: str) -> None:
        """Condemn all checkpoints of `step` and of later steps. All ranks."""
        writing = [self._save.step] if self._save is not None and not self._save.cancelled else []
        for other in sorted(other for other in {*self.saved, *self.unread, *writing} if other >= step):
            self.condemn(other, reason)

    def prune(self, good_step: int | None) -> None:
        """Remove checkpoints. Kept are the newest `keep` good ones, the ones that are kept forever, and the ones that
        may still become good.

        The newest good one is never removed. All ranks.
        """
        good = [step for step in self.saved if good_step is not None and step <= good_step]
        if len(good) < self.keep:
            return  # remove nothing while there are so few: a condemned checkpoint may be the only copy left
        old = [step for step in [*self.saved, *self.unread] if step < good[-self.keep]]
        spare = [step for step in old if not (self.keep_every and step % self.keep_every == 0)]
        self.saved = [step for step in self.saved if step not in spare]
        self.unread.difference_update(spare)
        for step in spare:
            self._report(step, "removed", reason=f"the newest {self.keep} good ones are kept")
            if self.is_chief:
                self._discard(self.path(step))
        if self.is_chief:
            for path in self.folder.glob("step-*.condemned"):
                match = STEP_NAME.match(path.name)
                if match and int(match[1]) < self.saved[0]:
                    self._discard(path)

    def mark_good(self, steps: list[int]) -> None:
        """Mark these checkpoints as good: enough healthy steps have followed each of them."""
        for step in steps:
            if self.states.of(step) == "verified":
                self._report(step, "good")

    # Helpers.

    def _content(self, values: Values) -> dict[str, Any]:
        plan = self.training.plan
        return {
            "step": values.position.step,
            "wall_ns": time.time_ns(),
            "values": values.to_json(),
            "mesh": plan.sizes,
            "world_size": plan.world_size,
            "parent": self.saved[-1] if self.saved else None,
            "torch_version": torch.__version__,
        }

    def _abort_save(self, save: Save) -> None:
        """End a save that failed on some rank or was condemned, once no rank is working on it.

        If the only problem is that the files cannot be read back now, the new checkpoint is kept."""
        self._save = None
        save.release()
        if not save.cancelled:
            save.cancel()
            reason = first_error("" if save.is_unread else save.error)  # collective: all ranks abort in the same step
            if reason:
                took = time.monotonic_ns() - save.start_ns
                self._report(save.step, "failed", duration_ns=took, stall_ns=save.stall_ns, reason=reason)
                if save.step in self.unread:  # the previous checkpoint of this step is kept
                    self.states.found(save.step, "complete")
                if self.is_chief and save.renamed:
                    self._discard(save.final)
                    save.put_older_back()
            else:
                self.unread.add(save.step)
                reason = first_error(save.error)
                if self.is_chief:
                    kept = f"{save.final.name} is kept, and verified when it is loaded"
                    self._report_problem(f"{kept}: {reason}", step=save.step)  # the save stays in state "complete"
                if save.older is not None:
                    self._discard(save.older)
        if self.is_chief:
            self._discard(save.scratch)

    def _scan(self, ledger: Ledger) -> tuple[list[int], set[int]]:
        """Steps of finished checkpoints, and steps of checkpoints that include the update of a batch skipped later."""

        def scan() -> tuple[list[int], list[int]]:
            steps = checkpoint_steps(self.folder)
            return steps, [step for step in steps if self._is_stale(step, ledger)]

        steps, stale = self._from_disk(scan)
        if self.is_chief:
            for step in steps:
                is_good = ledger.good_step is not None and step <= ledger.good_step
                self.states.found(step, "good" if is_good else "complete")
        return steps, set(stale)

    def _from_disk(self, read: Callable[[], _T]) -> _T:
        """Send all ranks, as JSON, what rank 0 reads from the folder. All ranks. Raises StorageError if the folder
        cannot be read now."""
        found, problem = None, ""
        if self.is_chief:
            try:
                found = read()
            except StorageError as error:
                problem = str(error)
            except OSError as error:  # an unreadable folder is not an empty one
                problem = f"{self.folder.name} cannot be read now ({error.strerror})"
        agreed: tuple[_T, str] = from_rank_0([found, problem])
        if agreed[1]:
            raise StorageError(agreed[1])
        return agreed[0]

    def _is_stale(self, step: int, ledger: Ledger) -> bool:
        try:
            manifest = read_manifest(self.path(step))
            values, then = Values.from_json(manifest["values"]), Ledger.from_json(manifest["extra"]["ledger"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            return False  # the file is damaged; this is found and reported when it is loaded
        return ledger.trained_on_skipped(then, values.position.batch_index)

    def _discard(self, path: Path) -> None:
        """Rename a folder immediately, and delete it in the background, because deleting may take long."""
        fence.check()
        trash = fence.scratch(path.with_name(f"{path.name}.{time.monotonic_ns()}"))
        with contextlib.suppress(OSError):
            path.rename(trash)
            self.background.submit(shutil.rmtree, trash, ignore_errors=True)

    def _report(self, step: int, state: str, **detail: Any) -> None:
        if self.is_chief:
            if state != "loaded":
                with failing_open("checkpoint states"):
                    self.states.advance(step, state)
            path = f"{self.folder.name}/{self.path(step).name}"
            self.recorder.event(event_kinds.CHECKPOINT, step=step, tier="disk", state=state, path=path, **detail)

    def _report_problem(self, reason: str, step: int | None = None) -> None:
        detail = {"tier": "disk", "state": "failed", "path": self.folder.name, "reason": reason}
        self.recorder.event(event_kinds.CHECKPOINT, step=step, **detail)
