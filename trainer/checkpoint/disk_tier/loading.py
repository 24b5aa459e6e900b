"""Load a checkpoint folder: verify manifest and hashes, and only then let torch unpickle.

    loaded = load_folder(folder, training)      # all ranks; raises CheckpointError on all if it cannot be used
    loaded.values.position.step

A checkpoint can be loaded on another mesh: torch's reader reads the parts that this rank's shards need.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from trainer.checkpoint.agreement import first_error
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError, read_manifest, verify_files
from trainer.checkpoint.disk_tier.safe_reader import SafeReader
from trainer.checkpoint.disk_tier.saving import one_line
from trainer.checkpoint.state import Values, allocate_optimizer_state, restore_rng, rng_state, training_tensors
from trainer.training.rank_training import Training

__all__ = ["LoadError", "Loaded", "load_folder"]


class LoadError(RuntimeError):
    """Raised if a checkpoint cannot be loaded although its hashes match, for example because of too little memory, a
    lost rank or a different model. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Contents of a checkpoint other than tensors."""

    values: Values
    extra: Mapping[str, Any]
    signature: Mapping[str, Any] = field(default_factory=dict)
    """Signature of this rank's state when it was saved; empty if the checkpoint was saved on another mesh
    (`trainer.checkpoint.continuity`)."""


def load_folder(folder: Path, training: Training) -> Loaded:
    """Load a checkpoint into `training`. All ranks; each checks the hashes of its share of the files first.

    If any rank finds a problem, all ranks raise it, with a message of one line: CheckpointError if the checkpoint is
    certainly damaged, StorageError if the storage cannot be read now, LoadError if the files are intact but cannot be
    loaded.
    """
    found: dict[str, Any] = {}

    def verify() -> None:
        manifest = read_manifest(folder)
        if ".metadata" not in manifest["files"]:
            raise CheckpointError(f"{folder.name}: the manifest lists no .metadata")
        verify_files(folder, manifest, sorted(manifest["files"])[training.rank :: training.plan.world_size])
        same_mesh = manifest["mesh"] == training.plan.sizes
        saved = manifest.get("signatures", {}).get(str(training.rank), {}) if same_mesh else {}
        found.update(extra=manifest["extra"], values=Values.from_json(manifest["values"]), signature=dict(saved))

    _on_all_ranks(verify, otherwise=CheckpointError)
    # The files are intact, so later errors do not mean damage.
    _on_all_ranks(lambda: _read(folder, training), otherwise=LoadError)
    return Loaded(values=found["values"], extra=found["extra"], signature=found["signature"])


def _read(folder: Path, training: Training) -> None:
    """Load tensors and values; call only after `verify`."""
    reader = SafeReader(folder)
    names = reader.read_metadata().state_dict_metadata
    training.discard()
    allocate_optimizer_state(training, names)
    prefix = f"rng.{training.rank}."
    rng = {prefix + name: value for name, value in rng_state(training.device).items() if prefix + name in names}
    # If compression was enabled after the save, it starts without state.
    tensors = {
        name: t
        for name, t in training_tensors(training).items()
        if name in names or not name.startswith("compression.")
    }
    with _quiet():
        dcp_load(tensors | rng, storage_reader=reader, no_dist=not dist.is_initialized())
    if rng:
        restore_rng({name.removeprefix(prefix): value for name, value in rng.items()}, training.device)


def _on_all_ranks(action: Callable[[], None], *, otherwise: type[CheckpointError | LoadError]) -> None:
    """Run `action` on all ranks. If the action fails on any rank, raise the first error on all ranks. It is a
    StorageError if the storage of a rank failed; otherwise its type is `otherwise`.
    """
    failed, error = _attempt(action)
    if storage := first_error(error if failed else ""):
        raise StorageError(storage)
    if found := first_error(error):
        raise otherwise(found)


def _attempt(action: Callable[[], None]) -> tuple[bool, str]:
    """Run `action`; returns (True if storage failed, error in one line or ""). Torch's checkpoint error is caught, too,
    although it is not an Exception.
    """
    try:
        action()
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        texts = [f"{type(cause).__name__}: {cause}" for cause in causes]
        return any(_is_storage_error(cause) for cause in causes), one_line("; ".join(texts) or str(error))
    except Exception as error:
        return _is_storage_error(error), one_line(f"{type(error).__name__}: {error}")
    return False, ""


def _is_storage_error(error: BaseException) -> bool:
    return isinstance(error, (StorageError, OSError, MemoryError))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about deprecated calls in its own checkpoint code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
