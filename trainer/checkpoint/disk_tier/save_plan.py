"""Plan of a sharded save (which rank writes which shard), computed once by torch and reused for every save.

    plan = SavePlan.make(tensors, rank=0)                  # collective; some tens of milliseconds
    layout_of(tensors)                                     # another layout (e.g. with optimizer state) needs a new plan
    shard = plan.write_shard(folder, host_tensors)         # no collective: may run in the background
    plan.write_metadata(folder, shards)                    # rank 0, with what every rank's `write_shard` returned

torch plans each save separately: each rank sends its list of tensors to rank 0, which removes duplicates and sends the
plan to all ranks. The lists depend only on names and shapes, which do not change in a run, so with a cached plan the
background thread needs no communication. The files have the format of torch.distributed.checkpoint, and its reader
loads them.

Nothing is pickled for a save, either. A tensor is stored as a header, which depends on its shape and type and is cached
(`trainer.checkpoint.disk_tier.tensor_frames`), and its bytes. Pickling the headers of 160 small tensors for each save
held the GIL for 14 ms; writing cached ones takes 0.5 ms.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.disk_tier.manifest import CheckpointError, FileDigest
from trainer.checkpoint.disk_tier.tensor_frames import HashedFile, Headers, bytes_of
from trainer.torch_compat import storage_info

__all__ = ["Layout", "SavePlan", "Shard", "layout_of"]

Layout = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The file of one rank: where each item of the rank's plan is, and the hash that the content must have."""

    name: str
    places: list[tuple[int, int]]
    """(offset, length) in bytes, in the order of the plan."""
    digest: FileDigest

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> Shard:
        """Inverse of the JSON form. Raises KeyError, TypeError or ValueError for anything else."""
        places = [(int(offset), int(length)) for offset, length in loaded["places"]]
        return cls(name=str(loaded["name"]), places=places, digest=FileDigest(**loaded["digest"]))


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The plan of one rank. `items_by_rank` and `metadata` exist on rank 0 only."""

    rank: int
    items: list[WriteItem]
    items_by_rank: list[list[WriteItem]]
    metadata: Metadata | None
    headers: Headers = field(default_factory=Headers)

    @classmethod
    def make(cls, tensors: Mapping[str, Tensor], *, rank: int) -> SavePlan:
        """Let torch make the plan. All ranks. Raises CheckpointError on all ranks if that fails."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
        local = planner.create_local_plan()
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        locals_: list[Any] = [local]
        if distributed:
            locals_ = [None] * dist.get_world_size()
            dist.gather_object(local, locals_ if rank == 0 else None)
        plans: list[Any] = []
        metadata, error = None, ""
        if rank == 0:
            try:
                plans, metadata = planner.create_global_plan(locals_)
            except (ValueError, AssertionError, RuntimeError) as failure:
                error = f"torch cannot plan the checkpoint: {failure}"
        own: list[Any] = [(plans[0] if plans else None, error)]
        if distributed:
            items_by_rank = [(plan, "") for plan in plans] if plans else [(None, error)] * len(locals_)
            dist.scatter_object_list(own, items_by_rank if rank == 0 else None)
        plan, error = own[0]
        if error:
            raise CheckpointError(error)
        return cls(
            rank=rank,
            items=plan.items,
            items_by_rank=[each.items for each in plans],
            metadata=metadata,
        )

    def write_shard(self, folder: Path, host: Mapping[str, Tensor]) -> Shard:
        """Write and sync this rank's file from tensors in host memory. Raises OSError."""
        name = f"__{self.rank}_0.distcp"
        places = []
        with (folder / name).open("xb", buffering=0) as file:
            shard = HashedFile(file)
            for item in self.items:
                start, value = shard.size, host[item.index.fqn]
                header = self.headers.of(value)
                if header is None:
                    buffer = io.BytesIO()
                    torch.save(value, buffer)
                    shard.write(buffer.getbuffer())
                else:
                    shard.write(header)
                    shard.write(bytes_of(value))
                places.append((start, shard.size - start))
            shard.flush()
            os.fsync(file.fileno())
        return Shard(name=name, places=places, digest=FileDigest(bytes=shard.size, blake2b=shard.digest.hexdigest()))

    def write_metadata(self, folder: Path, shards: Sequence[Shard]) -> None:
        """Write and sync torch's `.metadata`. Rank 0."""
        assert self.metadata is not None
        results = [
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=length,
                    storage_data=storage_info(relative_path=shard.name, offset=offset, length=length),
                )
                for item, (offset, length) in zip(items, shard.places, strict=True)
            ]
            for items, shard in zip(self.items_by_rank, shards, strict=True)
        ]
        FileSystemWriter(folder, sync_files=True).finish(dataclasses.replace(self.metadata), results)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Names, shapes and types that a plan depends on."""
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}
