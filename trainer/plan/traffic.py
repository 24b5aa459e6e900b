"""Which collectives a step makes on a rank, how often and with how many bytes, from the configuration alone.

    for call in rank_traffic(config, plan, pp_rank=0):
        call.dimension, call.op, call.calls, call.num_bytes      # a step; bytes as the probes record them
        call.bus_bytes                                           # what a ring sends over each link

Recorded bytes are a rank's input: for an all_gather its own part, for a reduce_scatter and an all_reduce the whole.
Calls of some bytes each (loss, norm, verdicts) are left out: they cost latency, no bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import Config
from trainer.mesh_plan import Plan
from trainer.plan.activations import FLOAT32_BYTES, compute_bytes
from trainer.plan.weights import rank_units

__all__ = ["Call", "rank_traffic"]

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kind of collective in one step of one rank."""

    dimension: str
    """Of the mesh: dp_replicate, dp_shard, tp, pp."""
    op: str
    """all_reduce | all_gather | reduce_scatter | send."""
    what: str
    size: int
    """Members of the group."""
    calls: int
    num_bytes: int
    """Of all calls of a step together, as recorded."""
    overlaps: str = ""
    """Behind what it can hide: backward | compute (forward and backward); empty: nothing, somebody waits for it."""

    @property
    def bus_bytes(self) -> float:
        """What a ring sends over each link, or the message of a send."""
        n = self.size
        factor = {
            "all_reduce": 2 * (n - 1) / n,
            "all_gather": n - 1,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "send": 1.0,
        }[self.op]
        return factor * self.num_bytes


def rank_traffic(config: Config, plan: Plan, *, pp_rank: int) -> list[Call]:
    """Of one training step without evaluation, checkpoints and probes."""
    calls = [*_data_parallel(config, plan, pp_rank), *_tensor_parallel(config, plan, pp_rank)]
    return [call for call in [*calls, *_pipeline(config, plan, pp_rank)] if call.num_bytes]


def _data_parallel(config: Config, plan: Plan, pp_rank: int) -> list[Call]:
    units, kind = rank_units(config, plan, pp_rank), plan.data_parallel_kind
    if kind == "none":
        return []
    if kind == "ddp":
        total = FLOAT32_BYTES * sum(unit.numel(plan.tp) for unit in units)
        buckets = math.ceil(total / (config.parallel.ddp_bucket_mb * _MIB))
        return [
            Call(dimension="dp_replicate", op="all_reduce", what="gradients", size=plan.dp_replicate, calls=buckets,
                 num_bytes=total, overlaps="backward")
        ]  # fmt: skip
    shard, low = plan.dp_shard, compute_bytes(config)
    calls = []
    if shard > 1:
        parts = [unit.numel(plan.tp, shard) for unit in units]
        keeps = plan.pp > 1 or not config.parallel.reshard_after_forward
        # The root stays gathered between forward and backward; a pipeline's parameters also between microbatches.
        passes = 1 if plan.pp > 1 else plan.num_microbatches
        gathers = [passes if keeps or unit.layer is None else 2 * passes for unit in units]
        calls.append(
            Call(dimension="dp_shard", op="all_gather", what="parameters", size=shard, calls=sum(gathers),
                 num_bytes=low * sum(part * count for part, count in zip(parts, gathers, strict=True)),
                 overlaps="compute")
        )  # fmt: skip
        calls.append(
            Call(dimension="dp_shard", op="reduce_scatter", what="gradients", size=shard, calls=len(units),
                 num_bytes=FLOAT32_BYTES * shard * sum(parts), overlaps="backward")
        )  # fmt: skip
    if plan.dp_replicate > 1:
        calls.append(
            Call(dimension="dp_replicate", op="all_reduce", what="gradients' shards", size=plan.dp_replicate,
                 calls=len(units), num_bytes=FLOAT32_BYTES * sum(unit.numel(plan.tp, shard) for unit in units),
                 overlaps="backward")
        )  # fmt: skip
    return calls


def _tensor_parallel(config: Config, plan: Plan, pp_rank: int) -> list[Call]:
    if plan.tp == 1:
        return []
    own, last = plan.stages.of_rank[pp_rank], plan.stages.count - 1
    layers = sum(len(plan.stages.layers[stage]) for stage in own)
    low = compute_bytes(config)
    # One activation of the residual stream, whole, of all microbatches of a step.
    whole = plan.local_batch_size * config.data.seq_len * config.model.dim * low
    count = plan.num_microbatches
    # The embedding's partial sums are reduced once, and the head reads the residual stream once. What is computed again
    # ends before the block's last reduction: nothing in backward needs its result.
    again = _recomputed_layers(config, plan, pp_rank)
    ends = int(0 in own) + int(last in own)
    if config.parallel.sequence_parallel:
        # Attention and feed-forward each gather and scatter once; backward does the reverse of both.
        gathers, scatters = 4 * layers + 2 * again + ends, 4 * layers + again + ends
        return [
            Call(dimension="tp", op="all_gather", what="activations", size=plan.tp, calls=gathers * count,
                 num_bytes=gathers * whole // plan.tp),
            Call(dimension="tp", op="reduce_scatter", what="activations", size=plan.tp, calls=scatters * count,
                 num_bytes=scatters * whole),
        ]  # fmt: skip
    # Backward sums the input's gradient for each of the five matrices that are split by columns.
    reduces = 7 * layers + again + ends
    return [
        Call(dimension="tp", op="all_reduce", what="activations", size=plan.tp, calls=reduces * count,
             num_bytes=reduces * whole)
    ]  # fmt: skip


def _recomputed_layers(config: Config, plan: Plan, pp_rank: int) -> int:
    kind, every = config.train.activation_checkpointing, config.train.checkpoint_every_n
    own = [layer for stage in plan.stages.of_rank[pp_rank] for layer in plan.stages.layers[stage]]
    if kind == "full":
        return len(own)
    return sum(1 for layer in own if layer % every == 0) if kind == "every_n" else 0


def _pipeline(config: Config, plan: Plan, pp_rank: int) -> list[Call]:
    """Messages that this rank sends: activations to the next stage, gradients to the one before."""
    if plan.pp == 1:
        return []
    number = {stage: rank for rank, stages in enumerate(plan.stages.of_rank) for stage in stages}
    low = compute_bytes(config) if plan.data_parallel_kind in ("fsdp", "hsdp") else FLOAT32_BYTES
    split = plan.tp if config.parallel.sequence_parallel else 1
    message = plan.micro_batch_size * (config.data.seq_len // split) * config.model.dim * low
    sends = 0
    for stage in plan.stages.of_rank[pp_rank]:
        sends += stage + 1 in number and number[stage + 1] != pp_rank
        sends += stage > 0 and number[stage - 1] != pp_rank
    calls = sends * plan.num_microbatches
    return [
        Call(dimension="pp", op="send", what="activations and their gradients", size=plan.pp, calls=calls,
             num_bytes=calls * message)
    ]  # fmt: skip
