"""This rank's part of a parameter, without communication.

own_region(parameter)               # (slice(0, 16), slice(32, 64)) of the whole parameter
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["own_region"]


def own_region(parameter: Tensor) -> tuple[slice, ...]:
    """This rank's part of a parameter as one slice per dimension; empty slices if it has none.

    FSDP splits what tensor parallelism has already split, although its mesh dimension comes first (DTensor's strided
    sharding).
    """
    region = [slice(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(region)
    splits = [
        (type(placement).__name__ == "_StridedShard", dim, placement.dim)  # type: ignore[attr-defined]
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    for _, mesh_dim, dim in sorted(splits):
        start, stop = region[dim].start, region[dim].stop
        size = -(-(stop - start) // parameter.device_mesh.size(mesh_dim))  # rounded up, as by torch.chunk
        first = min(start + place[mesh_dim] * size, stop)
        region[dim] = slice(first, min(first + size, stop))
    return tuple(region)
