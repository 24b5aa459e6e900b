"""Replica groups: the ranks that hold the same bits of a parameter or of its optimizer state.

group = replica_group(plan, rank, parameter)
group.members, group.coefficient        # (0, 2), 1: the coefficients of a group add up to zero
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from probes.collectives.groups.group_label import group_label
from trainer.layout.plan import Plan

__all__ = ["ReplicaGroup", "replica_group"]


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold the same bits of a tensor, this one among them."""

    label: str
    members: tuple[int, ...]
    coefficient: int
    """Coefficient of this rank's vote; those of all members add up to zero."""


def replica_group(plan: Plan, rank: int, tensor: Tensor) -> ReplicaGroup:
    """The ranks that hold what `rank` holds of a parameter or of its optimizer state."""
    split = {"pp"}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        # What is neither whole nor added up is split, in whatever way.
        placements = zip(names, tensor.placements, strict=True)
        joined = (name for name, placement in placements if not placement.is_replicate())
        split |= {dim for name in joined for dim in name.split("+")}
    at = plan.coordinates(rank)
    members = tuple(
        other
        for other in range(plan.world_size)
        if all(place == at[dim] for dim, place in plan.coordinates(other).items() if dim in split)
    )
    dims = [dim for dim, size in plan.sizes.items() if size > 1 and dim not in split]
    label = group_label("+".join(dims) or "shard", members)
    last = rank == members[-1]
    return ReplicaGroup(label, members, 0 if len(members) == 1 else 1 - len(members) if last else 1)
