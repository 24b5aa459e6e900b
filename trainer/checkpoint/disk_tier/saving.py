"""One save to disk, carried out in a background thread.

    save = Save(step=50, final=folder / "step-00000050", ..., executor=executor)
    save.submit()                       # stage 1 of 3; returns immediately
    save.vote()                         # this rank's vote, once a step
    save.submit()                       # the next stage, when no rank is pending and none has failed

1. write: every rank writes and syncs its shard in the scratch folder, with a note of its size and hash,
2. finish: rank 0 writes torch's metadata and the manifest, and renames the folder; an older checkpoint of the step is
   kept as `step-00000050.older` until the new one is verified,
3. verify: every rank reads its file back from the disk, and compares the hash with that computed from memory.

The ranks agree on each transition by votes in a reduction that every step does anyway. The thread does no collectives,
and uses neither the recorder nor the training's tensors.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.continuity import signature
from trainer.checkpoint.disk_tier.listing import subfolders
from trainer.checkpoint.disk_tier.manifest import (
    CheckpointError,
    StorageError,
    digest_file,
    read_manifest,
    verify_files,
    write_manifest,
)
from trainer.checkpoint.disk_tier.save_plan import SavePlan, Shard
from trainer.checkpoint.memory_tier.host_copy import HostCopy
from trainer.fsync import fsync_path

__all__ = ["STAGES", "Save", "SaveVote", "older_of", "one_line", "recover_older"]

STAGES = ("write", "finish", "verify")
_METADATA = ".metadata"
_OLDER = ".older"


class SaveVote(NamedTuple):
    """One rank's vote on the save in the background, or the sums over all ranks."""

    pending: float = 0.0
    failed: float = 0.0


class Save:
    """One rank's part of one save. All methods are for the training thread; `_write` etc. run in the background
    thread.
    """

    def __init__(
        self,
        *,
        step: int,
        final: Path,
        scratch: Path,
        plan: SavePlan,
        copy: HostCopy,
        manifest: Callable[[], Mapping[str, Any]],
        executor: Executor,
    ) -> None:
        self.step = step
        self.final = final
        self.scratch = scratch
        self.start_ns = time.monotonic_ns()
        self.stall_ns = 0
        """Nanoseconds for which the training was blocked."""
        self.nbytes = 0
        """Total size of all shards; set on rank 0 after `finish`."""
        self.error = ""
        """Error on this rank, one line; empty if none."""
        self.is_unread = False
        """True if the only error is that the finished files cannot be read back now. This does not prove that they are
        damaged.
        """
        self.renamed = False
        self.older: Path | None = None
        """Path of an older checkpoint of the step that was moved aside; set on rank 0."""
        self._plan = plan
        self._copy: HostCopy | None = copy
        self._manifest = manifest
        self._executor = executor
        self._stage = -1
        self._future: Future[None] | None = None
        self._cancelled = False
        self._naming = threading.Lock()
        copy.borrowers += 1

    @property
    def stage(self) -> str:
        """The stage that was submitted last."""
        return STAGES[self._stage]

    @property
    def is_last_stage(self) -> bool:
        return self._stage == len(STAGES) - 1

    def vote(self) -> SaveVote:
        """This rank's vote: is it still working on the stage, and has it failed?"""
        pending = self._future is not None and not self._future.done()
        return SaveVote(pending=float(pending), failed=float(bool(self.error)))

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def submit(self) -> None:
        """Start the next stage."""
        self.release()
        self._stage += 1
        work = {"write": self._write, "finish": self._finish, "verify": self._verify}[self.stage]
        self._future = self._executor.submit(self._guarded, work)

    def wait(self) -> None:
        """Wait until this rank is no longer pending."""
        if self._future is not None:
            self._future.result()

    def release(self) -> None:
        """Release the copy. This happens after the first stage, or once the save is cancelled and no longer pending."""
        if self._copy is not None and self._stage >= 0:
            self._copy.borrowers -= 1
            self._copy = None

    def cancel(self) -> None:
        """Prevent the final rename. Afterwards `renamed` says whether the folder already had its final name."""
        with self._naming:
            self._cancelled = True

    def put_older_back(self) -> None:
        """Restore the name of the older checkpoint of the step. If that fails, the next attempt does it."""
        if self.older is not None:
            with contextlib.suppress(OSError):
                self.older.rename(self.final)

    # In the background.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            if not self._cancelled:
                fence.check()
                work()
        except (Exception, fence.Fenced) as error:  # the training thread checks the fence separately
            self.is_unread = self.stage == "verify" and isinstance(error, (StorageError, OSError))
            self.error = one_line(f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        assert self._copy is not None
        self.scratch.mkdir(parents=True, exist_ok=True)
        rank = self._plan.rank
        self._copy.wait()
        rng: dict[str, Tensor] = {f"rng.{rank}.{name}": value for name, value in self._copy.rng.items()}
        shard = self._plan.write_shard(self.scratch, self._copy.tensors | rng)
        note = shard.to_json() | {"signature": signature(self._copy.tensors, self._copy.rng)}
        self._note(rank).write_text(json.dumps(note))

    def _finish(self) -> None:
        if self._plan.rank:
            return
        notes = [self._read_note(rank) for rank in range(len(self._plan.items_by_rank))]
        shards = [shard for shard, _ in notes]
        self._plan.write_metadata(self.scratch, shards)
        files = {shard.name: shard.digest for shard in shards}
        files[_METADATA] = digest_file(self.scratch / _METADATA)
        self.nbytes = sum(digest.bytes for digest in files.values())
        signatures = {str(rank): found for rank, (_, found) in enumerate(notes)}
        write_manifest(self.scratch, {**self._manifest(), "signatures": signatures}, files)
        with self._naming:
            if self._cancelled:
                raise CheckpointError("the save was cancelled")
            fence.check()
            self._take_name()
        fsync_path(self.final.parent)

    def _take_name(self) -> None:
        """Rename the folder to its final name. An older checkpoint of the step is kept aside until this one is
        verified.
        """
        with contextlib.suppress(FileNotFoundError):
            self.older = self.final.rename(older_of(self.final))
        try:
            self.scratch.rename(self.final)
        except OSError:
            self.put_older_back()
            raise
        self.renamed = True

    def _verify(self) -> None:
        rank = self._plan.rank
        manifest = read_manifest(self.final)
        own = [f"__{rank}_0.distcp", *([_METADATA] if rank == 0 else [])]
        verify_files(self.final, manifest, own, from_disk=True)

    def _note(self, rank: int) -> Path:
        return self.scratch / f"__{rank}.json"

    def _read_note(self, rank: int) -> tuple[Shard, dict[str, int]]:
        """Read a rank's note about its shard, and remove the note, which is not part of the checkpoint."""
        path = self._note(rank)
        try:
            note = json.loads(path.read_bytes())
            shard, found = Shard.from_json(note), {str(part): int(value) for part, value in note["signature"].items()}
            path.unlink()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.final.name}: the shard record of rank {rank} cannot be read ({error})"
            ) from None
        return shard, found


def older_of(final: Path) -> Path:
    """Path at which an older checkpoint of the same step is kept until the newer one is verified."""
    return final.with_name(final.name + _OLDER)


def recover_older(folder: Path) -> None:
    """Restore the names of older checkpoints that an interrupted save moved aside; if the newer one exists, remove the
    older one instead. Called at the start of an attempt, after `fence.sweep`. Raises OSError.
    """
    names = subfolders(folder)
    for name in names:
        if name.endswith(_OLDER):
            older, final = folder / name, folder / name.removesuffix(_OLDER)
            fence.check()
            if final.name in names:
                shutil.rmtree(older, ignore_errors=True)
            else:
                older.rename(final)


def one_line(text: str) -> str:
    """An error's text on one line, for an event."""
    return " ".join(text.split())[:500]
