"""Checkpoints on disk: sharded, hashed, complete or not there at all.

    disk = DiskCheckpoints(run.checkpoints, training, recorder, keep=3)
    disk.save(values, extra={"skipped": [...]})     # all ranks; False if it failed, and training goes on
    loaded = disk.load_newest()                     # all ranks; None if there is none

A folder is `step-00000050.a0.tmp` (of attempt 0) while it is written, gets its manifest last and then its name, in
one rename:

1. every rank writes its shard (torch.distributed.checkpoint), synced to the disk,
2. every rank reads its files back and hashes them,
3. rank 0 writes the manifest with all sizes and hashes, syncs, renames the folder, syncs its parent.

A folder that must not be used again is renamed to `step-00000050.condemned`. Loading checks all hashes before torch
opens any file, and takes the checkpoint before if one is not as it was written.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from probes.recorder import Recorder
from trainer.checkpoint.agreement import everyone, first_error, from_rank_0
from trainer.checkpoint.manifest import (
    CheckpointError,
    FileDigest,
    digest_file,
    fsync_path,
    read_manifest,
    verify_files,
    write_manifest,
)
from trainer.checkpoint.state import Values, allocate_optimizer_state, restore_rng, rng_state, training_tensors
from trainer.recovery import fence
from trainer.training import Training

__all__ = ["DiskCheckpoints", "Loaded", "checkpoint_steps"]

_NAME = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held besides tensors."""

    step: int
    values: Values
    extra: Mapping[str, Any]


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("step-*") if path.is_dir() and not path.is_symlink())
    return sorted(int(match[1]) for match in found if match)


class DiskCheckpoints:
    """The checkpoints of a run. Methods marked "all ranks" are collective; rank 0 alone renames and removes."""

    def __init__(self, folder: Path, training: Training, recorder: Recorder, *, keep: int) -> None:
        self.folder = folder
        self.training = training
        self.recorder = recorder
        self.keep = keep
        self.is_chief = training.rank == 0
        self.saved: list[int] = []
        """Steps that this run may go back to, oldest first; the same on all ranks."""

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, values: Values, extra: Mapping[str, Any]) -> bool:
        """Write a checkpoint of the state as it is now. All ranks get the same answer; a failure is an event."""
        step, start = values.position.step, time.monotonic_ns()
        if step in self.saved:
            return True
        final = self.path(step)
        scratch = fence.scratch(final)
        self._tell(step, "writing")
        error = first_error(self._attempt(lambda: self._clear(scratch, final)))
        if not error:
            error = first_error(self._attempt(lambda: self._write(scratch)))
        # Even after an error: every rank takes part in every exchange, or the others wait for ever.
        digests = everyone({} if error else self._digests(scratch))
        error = error or next((f"rank {r}: {d['error']}" for r, d in enumerate(digests) if "error" in d), "")
        if not error:
            files = {name: FileDigest(**digest) for part in digests for name, digest in part.items()}
            error = first_error(self._attempt(lambda: self._finish(scratch, final, values, extra, files)))
        duration = time.monotonic_ns() - start
        if error:
            self._tell(step, "failed", duration_ns=duration, stall_ns=duration, reason=error)
            return False
        size = sum(digest.bytes for digest in files.values())
        self._tell(step, "complete", duration_ns=duration, stall_ns=duration, bytes=size)
        self.saved.append(step)
        return True

    def load_newest(self) -> Loaded | None:
        """Load the newest checkpoint whose hashes agree; those that do not are condemned. All ranks.

        Raises CheckpointError if there are checkpoints but none can be used: to start over must be asked for.
        """
        if self.is_chief:
            fence.sweep(self.folder)
        steps: list[int] = from_rank_0(checkpoint_steps(self.folder) if self.is_chief else [])
        for step in reversed(steps):
            error, loaded = self._try_load(step)
            if loaded is not None:
                self.saved = [older for older in steps if older <= step]
                self._tell(step, "loaded")
                return loaded
            self.condemn(step, error)
        if steps:
            raise CheckpointError(
                f"{self.folder}: none of {len(steps)} checkpoints can be used; checkpoint.resume=false starts over"
            )
        return None

    def load(self, step: int) -> Loaded | None:
        """Load one checkpoint; if its hashes do not agree, condemn it and return None. All ranks."""
        error, loaded = self._try_load(step)
        if loaded is None:
            self.condemn(step, error)
        else:
            self._tell(step, "loaded")
        return loaded

    def condemn(self, step: int, reason: str) -> None:
        """Never use a checkpoint again. All ranks call it; the folder stays, under another name, until it is pruned."""
        self.saved = [other for other in self.saved if other != step]
        self._tell(step, "condemned", reason=reason)
        if self.is_chief:
            fence.check()
            path = self.path(step)
            target = path.with_name(path.name + ".condemned")
            with contextlib.suppress(OSError):
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)

    def prune(self, protected: int | None) -> None:
        """Remove all but the newest `keep` checkpoints, and never `protected`, the newest good one. All ranks."""
        fence.check()
        spare = [step for step in self.saved[: -self.keep] if step != protected]
        self.saved = [step for step in self.saved if step not in spare]
        for step in spare:
            self._tell(step, "removed", reason=f"the newest {self.keep} are kept")
            if self.is_chief:
                self._remove(self.path(step))
        if self.is_chief and self.saved:
            for path in self.folder.glob("step-*.condemned"):
                match = _NAME.match(path.name)
                if match and int(match[1]) < self.saved[0]:
                    self._remove(path)

    def mark_good(self, step: int) -> None:
        """Say that enough healthy steps followed."""
        self._tell(step, "good")

    # Saving.

    def _clear(self, scratch: Path, final: Path) -> None:
        if self.is_chief:
            fence.check()
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            scratch.mkdir(parents=True)

    def _write(self, scratch: Path) -> None:
        tensors = training_tensors(self.training) | self._rng_tensors()
        writer = FileSystemWriter(scratch, single_file_per_rank=True, sync_files=True, overwrite=False)
        with _quiet():
            dcp_save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())

    def _rng_tensors(self) -> dict[str, Tensor]:
        return {f"rng.{self.training.rank}.{k}": v for k, v in rng_state(self.training.device).items()}

    def _digests(self, scratch: Path) -> dict[str, Any]:
        """Hashes of what this rank wrote; rank 0 wrote the metadata too."""
        try:
            paths = list(scratch.glob(f"__{self.training.rank}_*"))
            if self.is_chief:
                paths.append(scratch / ".metadata")
            return {path.name: asdict(digest_file(path)) for path in paths}
        except (OSError, CheckpointError) as error:
            return {"error": str(error)}

    def _finish(
        self, scratch: Path, final: Path, values: Values, extra: Mapping[str, Any], files: Mapping[str, FileDigest]
    ) -> None:
        if not self.is_chief:
            return
        plan = self.training.plan
        content = {
            "step": values.position.step,
            "wall_ns": time.time_ns(),
            "values": values.to_json(),
            "extra": dict(extra),
            "mesh": plan.sizes,
            "world_size": plan.world_size,
            "parent": self.saved[-1] if self.saved else None,
            "torch_version": torch.__version__,
        }
        write_manifest(scratch, content, files)
        fence.check()
        scratch.rename(final)
        fsync_path(self.folder)

    @staticmethod
    def _attempt(action: Any) -> str:
        """Run it; the error in one line, or nothing. torch's checkpoint error is no Exception."""
        try:
            action()
        except CheckpointException as error:
            causes = [f"{type(e).__name__}: {e}" for e, _ in error.failures.values()]
            return _one_line("; ".join(causes) or str(error))
        except Exception as error:
            return _one_line(f"{type(error).__name__}: {error}")
        return ""

    # Loading.

    def _try_load(self, step: int) -> tuple[str, Loaded | None]:
        folder, rank, world = self.path(step), self.training.rank, self.training.plan.world_size
        found: dict[str, Any] = {}

        def verify() -> None:
            manifest = read_manifest(folder)
            if ".metadata" not in manifest["files"]:
                raise CheckpointError(f"{folder.name}: the manifest lists no .metadata")
            verify_files(folder, manifest, sorted(manifest["files"])[rank::world])
            found.update(manifest, loaded=Values.from_json(manifest["values"]))

        error = first_error(self._attempt(verify)) or first_error(self._attempt(lambda: self._read(folder)))
        if error:
            return error, None
        return "", Loaded(step=step, values=found["loaded"], extra=found["extra"])

    def _read(self, folder: Path) -> None:
        """Only after `verify`: from here on torch unpickles."""
        reader = FileSystemReader(folder)
        names = reader.read_metadata().state_dict_metadata
        self.training.discard()
        allocate_optimizer_state(self.training, names)
        rng = {name: value for name, value in self._rng_tensors().items() if name in names}
        with _quiet():
            tensors = training_tensors(self.training) | rng
            dcp_load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        if rng:
            prefix = f"rng.{self.training.rank}."
            restore_rng({name.removeprefix(prefix): value for name, value in rng.items()}, self.training.device)

    # The folder.

    @staticmethod
    def _remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def _tell(self, step: int, state: str, **detail: Any) -> None:
        if self.is_chief:
            path = f"{self.folder.name}/{self.path(step).name}"
            self.recorder.event("checkpoint", step=step, tier="disk", state=state, path=path, **detail)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own deprecated calls inside its checkpoint code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
