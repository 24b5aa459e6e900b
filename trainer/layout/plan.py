"""Resolve a configuration and a number of ranks into the parallel layout, without torch or process groups.

    plan = resolve(config, world_size=8)
    plan.sizes            # {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "ep": 1, "cp": 1, "tp": 2}
    plan.coordinates(5)   # {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "ep": 0, "cp": 0, "tp": 1}

Ranks are numbered with `tp` fastest, then `cp`, `ep`, `dp_shard`, `dp_replicate`, `pp`: groups with the most
communication are closest.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.constraints import CHECKS

__all__ = ["MESH_DIMS", "Plan", "fitting_world", "resolve", "split_layers"]

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")

_STAGES_OF_SCHEDULE = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv_zero_bubble": 2}


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


def resolve(config: Config, world_size: int) -> Plan:
    """Check `config` against `world_size` ranks and fill in open values. Raises ConfigError (one line)."""
    if world_size < 1:
        raise ConfigError(f"world size = {world_size}: must be at least 1")
    sizes = _mesh_sizes(config, world_size)
    _check_tensor_parallel(config, sizes["tp"])
    stages = _pipeline_stages(config, sizes["pp"])
    local, micro = _batch_sizes(config, sizes["dp_replicate"] * sizes["dp_shard"] * sizes["ep"], sizes["pp"])
    plan = Plan(
        world_size=world_size,
        **sizes,
        local_batch_size=local,
        micro_batch_size=micro,
        stages=stages,
        schedule=config.parallel.schedule,
        zero1=config.parallel.zero1 and sizes["dp_replicate"] > 1,
        offloads_parameters=config.parallel.cpu_offload == "all",
    )
    for check in CHECKS:
        check(config, plan)
    return plan


def fitting_world(config: Config, num_ranks: int) -> int:
    """The largest world of at most `num_ranks` ranks for which `config` has a layout; 0 if there is none."""
    for world_size in range(num_ranks, 0, -1):
        try:
            resolve(config, world_size)
        except ConfigError:
            continue
        return world_size
    return 0


def _mesh_sizes(config: Config, world_size: int) -> dict[str, int]:
    parallel = config.parallel
    sizes = {dim: int(getattr(parallel, dim)) for dim in MESH_DIMS}
    fixed = 1
    for size in sizes.values():
        fixed *= size if size > 0 else 1
    product = " x ".join(f"{dim} {size}" for dim, size in sizes.items() if size > 0)
    free = [dim for dim, size in sizes.items() if size == -1]
    if free:
        if world_size % fixed:
            raise ConfigError(
                f"parallel.{free[0]} = -1: {product} = {fixed} does not divide the world size {world_size}"
            )
        sizes[free[0]] = world_size // fixed
    elif fixed != world_size:
        raise ConfigError(
            f"parallel = {product}: makes {fixed} ranks but the world size is {world_size}; "
            f"the product must be {world_size}, or leave dp_shard at -1"
        )
    return sizes


def _check_tensor_parallel(config: Config, tp: int) -> None:
    if tp == 1:
        return
    model = config.model
    divided = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.kv_heads,
        "model.vocab_size": model.vocab_size,
    }
    if not model.num_experts:
        divided["model.hidden_dim"] = model.ffn_dim
    if config.parallel.sequence_parallel or model.num_experts:
        divided["data.seq_len"] = config.data.seq_len
    for key, value in divided.items():
        if value % tp:
            raise ConfigError(f"{key} = {value}: must be divisible by parallel.tp = {tp}")


def _pipeline_stages(config: Config, pp: int) -> Stages:
    parallel, model = config.parallel, config.model
    if pp == 1:
        if parallel.stage_costs:
            raise ConfigError(
                f"parallel.stage_costs = {len(parallel.stage_costs)} numbers: needs parallel.pp above 1, "
                "there are no stages to balance"
            )
        return split_layers(model.num_layers, 1, 1, "loop", [])
    per_rank = parallel.stages_per_rank or _STAGES_OF_SCHEDULE[parallel.schedule]
    single = _STAGES_OF_SCHEDULE[parallel.schedule] == 1
    if single != (per_rank == 1) or (parallel.schedule == "zbv_zero_bubble" and per_rank != 2):
        allowed = "1" if single else "2" if parallel.schedule == "zbv_zero_bubble" else "2 or more"
        raise ConfigError(
            f"parallel.stages_per_rank = {per_rank}: schedule {parallel.schedule} takes {allowed} stages a rank"
        )
    if config.train.activation_checkpointing == "selective" and parallel.schedule.endswith("zero_bubble"):
        raise ConfigError(
            "train.activation_checkpointing = 'selective': torch runs its backward as one pass, but schedule "
            f"{parallel.schedule} splits it in two; allowed: none, full, every_n"
        )
    if config.data.document_mask:
        raise ConfigError(
            f"data.document_mask = true: needs parallel.pp = 1, not {pp} (only the first stage sees the separators)"
        )
    if model.tie_embeddings:
        raise ConfigError(
            f"model.tie_embeddings = true: needs parallel.pp = 1, not {pp} (first and last stage share no memory)"
        )
    if model.num_layers < pp * per_rank:
        raise ConfigError(
            f"parallel.pp = {pp}: {pp} ranks x {per_rank} stages = {pp * per_rank} stages "
            f"need at least as many layers, model.num_layers = {model.num_layers}"
        )
    if parallel.stage_costs and len(parallel.stage_costs) != model.num_layers:
        raise ConfigError(
            f"parallel.stage_costs = {len(parallel.stage_costs)} numbers: "
            f"must be one for each of model.num_layers = {model.num_layers}"
        )
    if any(cost <= 0 for cost in parallel.stage_costs):
        raise ConfigError(f"parallel.stage_costs = {parallel.stage_costs}: each must be above 0")
    style = "v" if parallel.schedule == "zbv_zero_bubble" else "loop"
    return split_layers(model.num_layers, pp, per_rank, style, list(parallel.stage_costs))


def _batch_sizes(config: Config, data_size: int, pp: int) -> tuple[int, int]:
    train = config.train
    if train.global_batch_size % data_size:
        raise ConfigError(
            f"train.global_batch_size = {train.global_batch_size}: must be divisible by the {data_size} data ranks"
        )
    local = train.global_batch_size // data_size
    # A pipeline needs several microbatches to keep its ranks busy; without a pipeline, a single pass is fastest.
    micro = train.micro_batch_size or (max(1, local // (2 * pp)) if pp > 1 else local)
    if local % micro:
        raise ConfigError(
            f"train.micro_batch_size = {micro}: must divide the {local} sequences of a rank "
            f"(global_batch_size {train.global_batch_size} / {data_size} data ranks)"
        )
    if pp > 1:
        _check_microbatches(config, local // micro, pp, micro)
    return local, micro


def _check_microbatches(config: Config, count: int, pp: int, micro: int) -> None:
    """Check the number of microbatches against torch's schedules."""
    schedule = config.parallel.schedule
    where = f"train.micro_batch_size = {micro}: makes {count} microbatch{'es' * (count != 1)} a step"
    if count < pp and schedule != "gpipe":
        raise ConfigError(f"{where}; schedule {schedule} needs at least parallel.pp = {pp}")
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % max(1, count // pp):
        raise ConfigError(
            f"{where}; schedule {schedule} needs a multiple of {count // pp}, the number of whole rounds of "
            f"parallel.pp = {pp}"
        )
    if schedule == "zbv_zero_bubble" and count < 2 * pp:
        raise ConfigError(f"{where}; schedule {schedule} needs at least 2 x parallel.pp = {2 * pp}")


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
