"""Mesh coordinates of the ranks of an attached loop: given in one call, or derived from what torch knows.

    describe(recorder, mesh)                     # a DeviceMesh, or {"pp": 2, "dp": 4}: names as in DeviceMesh
    derive(recorder)                             # once, after the first step: named groups, stages of a pipeline

A place has a coordinate for each dimension in table `ranks`. Ranks that differ in `pp` have different work, and are not
compared.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping, Set
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...tape_recorder import TapeRecorder
from ...torch_compat import group_world

__all__ = ["DIMENSIONS", "derive", "describe", "dimension_of"]

logger = logging.getLogger("rankscope.probes")
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_OTHER_NAMES = {
    **dict.fromkeys(("pipeline", "pipe", "stage", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("dp", "ddp", "data", "data_parallel", "replicate", "replica", "dp_rep"), "dp_replicate"),
    **dict.fromkeys(("fsdp", "shard", "zero", "sharded", "hsdp_shard", "edp"), "dp_shard"),
    **dict.fromkeys(("context", "sequence", "cp_seq", "ulysses"), "cp"),
    **dict.fromkeys(("tensor", "model", "mp", "tensor_parallel", "tmp"), "tp"),
    **dict.fromkeys(("expert", "experts", "expert_parallel"), "ep"),
}
_MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp_replicate",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
}
"""Descriptions of the groups of Megatron-core, which has no DeviceMesh."""
_STAGES = "torch.distributed.pipelining.stage"


def dimension_of(name: str) -> str | None:
    """Column of `ranks` for a mesh dimension; None for an unknown name."""
    plain = name.lower().removeprefix("mesh_")
    return plain if plain in DIMENSIONS else _OTHER_NAMES.get(plain)


def _dimension_in_use(name: str, sharded: Set[str]) -> str | None:
    """Return `dimension_of(name)`, but `dp_shard` for a replica dimension over which parameters are sharded: users of
    FSDP2 also call their shard dimension `dp`."""
    dimension = dimension_of(name)
    is_of_shards = dimension == "dp_replicate" and name.lower().removeprefix("mesh_") in sharded
    return "dp_shard" if is_of_shards else dimension


def _sharded_names() -> frozenset[str]:
    """Mesh dimensions over which a parameter of this process is sharded."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return frozenset()
    found = (each for each in gc.get_objects() if issubclass(type(each), tensor.DTensor) and each.requires_grad)
    return frozenset(
        name.lower()
        for each in found
        for name, placement in zip(each.device_mesh.mesh_dim_names or (), each.placements, strict=False)
        if placement.is_shard()
    )


def describe(recorder: TapeRecorder, mesh: Any) -> dict[str, int]:
    """Record this rank's coordinates in `mesh`; returns them. A mesh that does not fit causes a warning."""
    if isinstance(mesh, Mapping):
        place = _place_in(recorder.rank, {str(name): int(size) for name, size in mesh.items()})
    else:
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        place = {str(name): int(at) for name, at in zip(names, coordinate, strict=False)}
    sharded = frozenset() if isinstance(mesh, Mapping) else _sharded_names()
    known = {dim: at for name, at in place.items() if (dim := _dimension_in_use(name, sharded)) is not None}
    if unknown := [name for name in place if dimension_of(name) is None]:
        logger.warning(
            "rankscope.describe: %s: not a dimension; names are %s", ", ".join(unknown), ", ".join(DIMENSIONS)
        )
    if known:
        recorder.describe(**known)
    return known


def _place_in(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of a rank; the last dimension varies fastest, as in `init_device_mesh`."""
    place: dict[str, int] = {}
    for name in reversed(list(sizes)):
        rank, place[name] = divmod(rank, max(1, sizes[name]))
    if rank:
        logger.warning("rankscope.describe: the mesh %s is smaller than the number of ranks", dict(sizes))
        return {}
    return place


def derive(recorder: TapeRecorder) -> dict[str, int]:
    """Record this rank's coordinates that process groups and pipeline stages show; returns them (empty if none)."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    sharded = _sharded_names()
    place = (_of_groups(recorder.rank, sharded) or _of_the_world(sharded)) | _of_stages()
    if place:
        recorder.describe(**place)
    return place


def _of_groups(rank: int, sharded: Set[str]) -> dict[str, int]:
    """Coordinates from the groups of a named DeviceMesh or of Megatron. Dimensions that are products of others are left
    out.

    A group of one rank shows nothing about the mesh: torchtitan creates one for each kind of parallelism that is off.
    """
    place: dict[str, int] = {}
    for group, members in group_world().pg_group_ranks.items():
        description = str(getattr(group, "group_desc", ""))
        is_named = description.startswith("mesh_")
        dimension = _dimension_in_use(description, sharded) if is_named else _MEGATRON.get(description)
        if dimension is not None and rank in members and len(members) > 1:
            place[dimension] = members[rank]
    return place


def _of_the_world(sharded: Set[str]) -> dict[str, int]:
    """Coordinate in a one-dimensional DeviceMesh of all ranks, which uses the world group."""
    made = (found for found in gc.get_objects() if issubclass(type(found), DeviceMesh))
    for found in made:
        for name, size in zip(found.mesh_dim_names or (), found.mesh.shape, strict=False):
            dimension = _dimension_in_use(name, sharded) if size == dist.get_world_size() else None
            if dimension is not None:
                return {dimension: int(found.get_local_rank(name))}
    return {}


def _of_stages() -> dict[str, int]:
    """The pipeline stage that this process computes. If it computes several, the first of them."""
    stages = pipeline_stages()
    return {"pp": int(stages[0].group_rank)} if stages else {}


def pipeline_stages() -> list[Any]:
    """This process's stages of `torch.distributed.pipelining`, if their pipelines span several ranks."""
    module = sys.modules.get(_STAGES)
    if module is None:
        return []
    base = module._PipelineStageBase
    return [found for found in gc.get_objects() if issubclass(type(found), base) and found.group_size > 1]
