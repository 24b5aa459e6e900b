"""Resolve a configuration and a number of ranks into the parallel layout, without torch or process groups.

plan = resolve(config, world_size=8)
fitting_world(config, num_ranks=7)    # 6, if seven ranks have no layout
"""

from __future__ import annotations

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.constraints import CHECKS
from trainer.layout.plan import MESH_DIMS, Plan, Stages, split_layers

__all__ = ["fitting_world", "resolve"]

_STAGES_OF_SCHEDULE = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv_zero_bubble": 2}


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
            f"the product must be {world_size}; --set parallel.dp_shard=-1 takes the ranks that are left"
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
