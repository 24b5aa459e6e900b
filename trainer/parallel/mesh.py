"""The device mesh of a plan, and the groups that are taken from it.

    mesh = build_mesh(plan, "cpu")        # None for a single rank
    tp_mesh = submesh(mesh, "tp")         # None where tp is 1
    dense_mesh(mesh, plan)                # what FSDP shards all but the experts over

The mesh has only the dimensions in use: a process group costs memory and a start-up exchange on every rank.
"""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.layout.plan import Plan

__all__ = ["build_mesh", "dense_mesh", "submesh"]


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh | None:
    """One mesh over all ranks with the plan's named dimensions. The default process group must exist."""
    if not plan.mesh_dims:
        return None
    names, sizes = zip(*plan.mesh_dims, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def submesh(mesh: DeviceMesh | None, *dims: str) -> DeviceMesh | None:
    """The part of `mesh` along `dims`, or None if none of them is in use."""
    if mesh is None:
        return None
    present = tuple(dim for dim in dims if dim in (mesh.mesh_dim_names or ()))
    if not present:
        return None
    return mesh[present if len(present) > 1 else present[0]]


def dense_mesh(mesh: DeviceMesh | None, plan: Plan) -> DeviceMesh:
    """FSDP's mesh of all parameters but experts: (shards), or (dp_replicate, shards) for HSDP.

    Shards are the dimensions of `dp_shard`, `ep` and `cp` that are in use, as one, called for instance `dp_shard+ep`.
    """
    assert mesh is not None
    parts = tuple(dim for dim in ("dp_shard", "ep", "cp") if dim in (mesh.mesh_dim_names or ()))
    shards = "+".join(parts)
    flat: DeviceMesh = mesh[parts]._flatten(shards) if len(parts) > 1 else mesh[shards]
    if plan.data_parallel_kind != "hsdp":
        return flat
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to make another way of taking a flattened dimension along
        return mesh["dp_replicate", shards]
