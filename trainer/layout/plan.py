"""The parallel layout of a run, without torch or process groups; `trainer.layout.resolve` makes it.

    plan.sizes            # {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "ep": 1, "cp": 1, "tp": 2}
    plan.coordinates(5)   # {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "ep": 0, "cp": 0, "tp": 1}

Ranks are numbered with `tp` fastest, then `cp`, `ep`, `dp_shard`, `dp_replicate`, `pp`: groups with the most
communication are closest.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MESH_DIMS", "Plan", "Stages", "split_layers"]

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layout of a run: how ranks, sequences and layers are divided. All numbers are counts."""

    world_size: int
    pp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    cp: int
    tp: int
    local_batch_size: int  # sequences of one step on one data rank
    micro_batch_size: int  # sequences of one forward pass
    stages: Stages
    schedule: str  # pipeline schedule; unused if pp is 1
    zero1: bool = False  # the optimizer's state is divided among replicas
    offloads_parameters: bool = False  # FSDP2 keeps parameters in host memory

    @property
    def sizes(self) -> dict[str, int]:
        return {dim: getattr(self, dim) for dim in MESH_DIMS}

    @property
    def data_size(self) -> int:
        """Number of data ranks. A data rank is a group of ranks that read the same sequences."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def loss_copies(self) -> int:
        """Divisor of each rank's loss, so that the sum over all ranks that have a loss is the mean loss."""
        return self.world_size // self.pp

    @property
    def num_microbatches(self) -> int:
        return self.local_batch_size // self.micro_batch_size

    @property
    def data_parallel_kind(self) -> str:
        """none | ddp | fsdp | hsdp.

        DDP's C++ reducer does not support DTensors, and does not see gradients that zero-bubble schedules compute
        outside backward. In these cases replicas use FSDP2 with a shard dimension of one (`hsdp`), in which gather and
        scatter are no-ops. A single rank uses FSDP2, too (`fsdp`), if its parameters stay in host memory. Experts are
        sharded over `dp_shard` and `cp` together, other parameters over `dp_shard`, `ep` and `cp`.
        """
        if self.dp_shard * self.ep * self.cp > 1 or self.offloads_parameters:
            return "hsdp" if self.dp_replicate > 1 else "fsdp"
        if self.dp_replicate > 1:
            zero_bubble = self.pp > 1 and self.schedule.endswith("zero_bubble")
            return "hsdp" if self.tp > 1 or zero_bubble else "ddp"
        return "none"

    def chunks(self, rank: int, exchange: str) -> tuple[tuple[int, ...], int]:
        """Return (indices of a rank's chunks of each sequence, number of equal chunks); see `parallel.cp_exchange`.

        In a ring each rank gets an early and a late chunk, since causal attention does less work for early tokens.
        """
        place = self.coordinates(rank)["cp"]
        if self.cp == 1 or exchange == "gather":
            return (place,), self.cp
        return (place, 2 * self.cp - 1 - place), 2 * self.cp

    @property
    def compiles(self) -> bool:
        """Return False for schedules that split backward passes in two, which compiled modules do not support."""
        return self.pp == 1 or not self.schedule.endswith("zero_bubble")

    @property
    def mesh_dims(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the device mesh's dimensions, without unused ones; empty for a single rank."""
        needed = {"dp_replicate", "dp_shard"} if self.data_parallel_kind == "hsdp" else set()
        needed |= {"dp_shard"} if self.ep > 1 or (self.offloads_parameters and self.cp == 1) else set()
        return tuple((dim, size) for dim, size in self.sizes.items() if size > 1 or dim in needed)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank`, by dimension."""
        sizes, found = self.sizes, dict[str, int]()
        for dim in reversed(MESH_DIMS):
            rank, found[dim] = divmod(rank, sizes[dim])
        return {dim: found[dim] for dim in MESH_DIMS}

    def data_rank(self, rank: int) -> int:
        """Index of the share of the global batch that `rank` reads."""
        at = self.coordinates(rank)
        return (at["dp_replicate"] * self.dp_shard + at["dp_shard"]) * self.ep + at["ep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Layers by stage and stages by pipeline rank.

    With the style `loop`, rank r has the stages r, r + pp, r + 2 pp and so on. With `v`, rank r has the stages r and
    2 pp - 1 - r, so that the first and the last stage are on one rank.
    """

    layers: tuple[tuple[int, ...], ...]
    of_rank: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.layers)


def split_layers(num_layers: int, pp: int, per_rank: int, style: str, costs: list[float]) -> Stages:
    """Split `num_layers` into `pp * per_rank` consecutive stages so that the costliest one is as cheap as possible.

    `costs` has one number per layer; empty means equal layers.
    """
    count = pp * per_rank
    layers = _cheapest_cut(costs or [1.0] * num_layers, count)
    if style == "v":
        of_rank: tuple[tuple[int, ...], ...] = tuple((rank, count - 1 - rank) for rank in range(pp))
    else:
        of_rank = tuple(tuple(range(rank, count, pp)) for rank in range(pp))
    return Stages(layers=layers, of_rank=of_rank)


def _cheapest_cut(costs: list[float], count: int) -> tuple[tuple[int, ...], ...]:
    """Dynamic programming: best[k][j] is the lowest (costliest stage, sum of squares) of the first j layers in k
    stages."""
    size = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    never = (float("inf"), float("inf"))
    best = [[never] * (size + 1) for _ in range(count + 1)]
    cut = [[0] * (size + 1) for _ in range(count + 1)]
    best[0][0] = (0.0, 0.0)
    for stage in range(1, count + 1):
        # Only the last stage must end with the last layer.
        for last in range(stage if stage < count else size, size + 1):
            for first in range(stage - 1, last):
                before, cost = best[stage - 1][first], total[last] - total[first]
                # The sum of squares spreads the rest evenly: 3 3 2 2 layers, not 3 3 3 1.
                candidate = (max(before[0], cost), before[1] + cost * cost)
                # On a tie take the later cut, so that early stages get the extra layer, since the last stage has the
                # head.
                if candidate <= best[stage][last]:
                    best[stage][last], cut[stage][last] = candidate, first
    bounds, last = [size], size
    for stage in range(count, 0, -1):
        last = cut[stage][last]
        bounds.append(last)
    bounds.reverse()
    return tuple(tuple(range(bounds[i], bounds[i + 1])) for i in range(count))
