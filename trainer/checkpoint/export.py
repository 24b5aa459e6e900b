"""Write a checkpoint's weights to one safetensors file, in one process, for any mesh that saved it.

    result = export(find_checkpoint(Path("runs/latest"), step=None), Path("model.safetensors"))
    result.num_parameters, result.step
    export_llama(folder, Path("llama/"), config.model)      # transformers' from_pretrained loads that folder

All hashes are checked before torch opens any file. The output gets its name when it is complete and synced.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from probes.guard.ledger import LEDGER_NAME, Ledger
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    read_manifest,
    verify_files,
)
from trainer.checkpoint.disk_tier.safe_reader import SafeReader
from trainer.config.config import ModelConfig
from trainer.fsync import fsync_path
from trainer.model.llama_names import llama_config, to_llama

__all__ = ["Exported", "export", "export_llama", "find_checkpoint", "proven_step"]

_PREFIX = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    folder: Path
    step: int
    num_tensors: int
    num_parameters: int
    num_bytes: int


def find_checkpoint(path: Path, *, step: int | None) -> Path:
    """Find the folder of a checkpoint: `path` itself, or the checkpoint of a run's step (None: the last complete one).

    Condemned checkpoints do not count. Raises CheckpointError, one line, if there is none.
    """
    if (path / MANIFEST_NAME).is_file():
        if path.name.endswith(".condemned"):
            raise CheckpointError(f"{path} was condemned by the run that made it. Choose another.")
        return path
    folder = path / "checkpoints"
    steps = checkpoint_steps(folder)
    if not steps:
        raise CheckpointError(f"{path}: has no finished checkpoint (expected checkpoints/step-*/{MANIFEST_NAME})")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise CheckpointError(f"{path}: has no checkpoint of step {step}. There are {', '.join(map(str, steps))}.")
    return folder / f"step-{step:08d}"


def proven_step(folder: Path) -> int | None:
    """If the checkpoint in `folder` has not been followed by healthy steps, the step of the newest checkpoint that has;
    otherwise None.
    """
    ledger, _ = Ledger.load(folder.parent / LEDGER_NAME)
    step = int(folder.name.rpartition("-")[2]) if folder.name.startswith("step-") else 0
    good_step = ledger.good_step or 0
    return good_step if 0 < good_step < step else None


def export_llama(folder: Path, out: Path, model: ModelConfig) -> Exported:
    """Write `model.safetensors` in Hugging Face's Llama naming with its `config.json` into the folder `out`.

    Raises CheckpointError for a damaged checkpoint or a model that is not a Llama, and OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        done = export(folder, out / "model.safetensors", rename=to_llama)
    except KeyError as error:
        raise CheckpointError(
            f"{folder}: {error.args[0]} has no counterpart in Llama: export it as safetensors"
        ) from None
    (out / "config.json").write_text(json.dumps(llama_config(model), indent=2) + "\n", encoding="utf-8")
    return done


def export(folder: Path, out: Path, *, rename: Callable[[str], str] = str) -> Exported:
    """Write the full weights, replacing `out`. Raises CheckpointError for a damaged checkpoint, and OSError."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest, sorted(manifest["files"]))
    tensors = {rename(name): tensor for name, tensor in _weights(folder).items()}
    if not tensors:
        raise CheckpointError(f"{folder}: holds no weights")
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    about = {"format": "pt", "step": str(manifest["step"]), "mesh": json.dumps(manifest["mesh"])}
    try:
        fresh.touch()  # raises OSError with the reason if nothing can be written
        save_file(tensors, fresh, metadata=about)
        fsync_path(fresh)
        fresh.replace(out)
        fsync_path(out.parent)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return Exported(
        folder=folder,
        step=int(manifest["step"]),
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_bytes=out.stat().st_size,
    )


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Full parameters by name. Raises CheckpointError if the checkpoint describes anything else."""
    reader = SafeReader(folder)
    whole = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(_PREFIX) and isinstance(found, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the missing process group and deprecated calls
        dcp_load(whole, storage_reader=SafeReader(folder), no_dist=True)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in whole.items()}
