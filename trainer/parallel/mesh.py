"""The device mesh of a plan, and the groups that are taken from it.

    mesh = build_mesh(plan, "cpu")        # None for a single rank
    tp_mesh = submesh(mesh, "tp")         # None where tp is 1

The mesh has only the dimensions in use: a process group costs memory and a start-up exchange on every rank.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.mesh_plan import Plan

__all__ = ["build_mesh", "submesh"]


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
