"""The device mesh of a plan, and its submeshes.

    mesh = build_mesh(plan, "cpu")        # None for a single rank
    tp_mesh = submesh(mesh, "tp")         # None if tp is 1
    joined_mesh(mesh, "ep", "tp")         # both as one dimension, called ep+tp
    dense_mesh(mesh, plan)                # FSDP's mesh of all parameters except experts
    expert_mesh(mesh, plan)               # FSDP's mesh of experts, if each rank has some of them

The mesh has only the dimensions in use: a process group costs memory and a start-up exchange on every rank.
"""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.layout.plan import Plan

__all__ = ["build_mesh", "dense_mesh", "expert_mesh", "joined_mesh", "submesh"]


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


def joined_mesh(mesh: DeviceMesh, *dims: str) -> DeviceMesh | None:
    """The used dimensions among `dims`, flattened to one named e.g. `dp_shard+ep`; None if none is used."""
    parts = tuple(dim for dim in dims if dim in (mesh.mesh_dim_names or ()))
    if not parts:
        return None
    return mesh[parts]._flatten("+".join(parts)) if len(parts) > 1 else mesh[parts[0]]


def dense_mesh(mesh: DeviceMesh | None, plan: Plan) -> DeviceMesh:
    """FSDP's mesh of all parameters except experts: (shards), or (dp_replicate, shards) for HSDP. The dimension
    `shards` joins `dp_shard`, `ep` and `cp`."""
    return _fsdp_mesh(mesh, plan, "dp_shard", "ep", "cp")


def expert_mesh(mesh: DeviceMesh | None, plan: Plan) -> DeviceMesh | None:
    """FSDP's mesh of experts if each rank has some of them: like `dense_mesh`, without `ep`. None if all ranks have all
    experts.
    """
    return _fsdp_mesh(mesh, plan, "dp_shard", "cp") if plan.ep * plan.tp > 1 else None


def _fsdp_mesh(mesh: DeviceMesh | None, plan: Plan, *dims: str) -> DeviceMesh:
    assert mesh is not None
    shards = joined_mesh(mesh, *dims)
    assert shards is not None
    if plan.data_parallel_kind != "hsdp":
        return shards
    (name,) = shards.mesh_dim_names or ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that slicing with a flattened dimension will change
        return mesh["dp_replicate", name]
