"""Layout of ranks: their positions in the mesh and their process groups.

    layout = Layout(pp=2, dp_shard=4, tp=2)
    layout.num_ranks                 # 16
    layout.members("dp_shard")       # (groups, members) global ranks, each rank once
    layout.labels("tp")              # label of each rank's group

Ranks are numbered with tp fastest, then dp_shard, dp_replicate, pp, as the trainer numbers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.collectives.groups.group_label import group_label

__all__ = ["DIMS", "WORLD", "Ints", "Layout"]

DIMS = ("pp", "dp_replicate", "dp_shard", "tp")
WORLD = "world"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh and of the work in it. `microbatches` of a step pass through `layers` blocks a stage."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    layers: int = 4
    ranks_per_node: int = 8

    @property
    def num_ranks(self) -> int:
        return self.pp * self.width

    @property
    def width(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def name(self) -> str:
        """Name in the usual notation: `ddp8`, `fsdp4xtp2`, `pp4-1f1bxfsdp2`."""
        parts = [f"pp{self.pp}-{self.schedule}"] if self.pp > 1 else []
        parts += [f"ddp{self.dp_replicate}"] if self.dp_replicate > 1 else []
        parts += [f"fsdp{self.dp_shard}"] if self.dp_shard > 1 else []
        parts += [f"tp{self.tp}"] if self.tp > 1 else []
        return "x".join(parts) or "single"

    def sizes(self) -> dict[str, int]:
        """Ranks along each dimension of the mesh."""
        return {dim: int(getattr(self, dim)) for dim in DIMS}

    def used_dims(self) -> list[str]:
        """Dimensions that have groups of more than one rank."""
        return [dim for dim, size in self.sizes().items() if size > 1]

    def coordinates(self) -> dict[str, Ints]:
        """Each dimension's coordinate by rank."""
        grids = np.unravel_index(np.arange(self.num_ranks), tuple(self.sizes().values()))
        return dict(zip(DIMS, grids, strict=True))

    def nodes(self) -> Ints:
        """Node of each rank."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    def members(self, dim: str) -> Ints:
        """(groups, members): global ranks of the groups along a dimension, or of the one world."""
        return _members(self, dim)

    def labels(self, dim: str) -> list[str]:
        """The label of each rank's group along a dimension."""
        return list(_labels(self, dim))

    def description(self, dim: str) -> str:
        """Torch's name of such a group."""
        return "default_pg" if dim == WORLD else f"mesh_{dim}"


@lru_cache(maxsize=256)
def _members(layout: Layout, dim: str) -> Ints:
    ranks = np.arange(layout.num_ranks)
    if dim == WORLD:
        return ranks[None, :]
    grid = ranks.reshape(tuple(layout.sizes().values()))
    return np.moveaxis(grid, DIMS.index(dim), -1).reshape(-1, layout.sizes()[dim])


@lru_cache(maxsize=256)
def _labels(layout: Layout, dim: str) -> tuple[Any, ...]:
    labels = [""] * layout.num_ranks
    for group in layout.members(dim).tolist():
        label = group_label(layout.description(dim), group)
        for rank in group:
            labels[rank] = label
    return tuple(labels)
