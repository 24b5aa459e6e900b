"""torch's checkpoint reader, restricted: the pickle `.metadata` may name only the classes that describe a checkpoint.

    reader = SafeReader(folder)
    reader.read_metadata()          # CheckpointError for a pickle that names anything else

A checkpoint may be untrusted: its manifest and hashes prove that it is complete, not that it is harmless. torch loads
`.metadata`, and entries that are not tensors, with the plain unpickler, which can run any code. Tensors are read with
`weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from probes.tape.files.safe_open import open_plain
from trainer.checkpoint.disk_tier.manifest import CheckpointError

__all__ = ["SafeReader"]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset({
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("pathlib", "PosixPath"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    *((_METADATA, name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    *(("torch", name) for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    )),
})  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads a checkpoint folder of the trainer."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the description of the checkpoint. Raises OSError, and CheckpointError if it describes anything but
        tensors.
        """
        with open(open_plain(Path(self.path) / ".metadata"), "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # a hostile pickle may raise anything
                raise CheckpointError(f"{self.path}: .metadata was refused: {error}") from None
        if not isinstance(metadata, Metadata) or not all(
            isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise CheckpointError(f"{self.path}: .metadata was refused: it describes more than tensors")
        return metadata
