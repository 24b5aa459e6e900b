"""Collectives of a step on a rank, their number and bytes, from the configuration alone.

    for call in rank_traffic(config, plan, pp_rank=0):
        call.dimension, call.op, call.calls, call.num_bytes      # a step; bytes as the probes record them
        call.bus_bytes                                           # what a ring sends over each link

The recorded bytes are a rank's input: its own part for an all_gather, the whole tensor for a reduce_scatter and an
all_reduce. Calls of a few bytes (loss, norm, verdicts) are left out, because they cost latency, not bandwidth. Expert
traffic is what a rank sends and receives if all experts are used equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.config import Config
from trainer.layout.plan import Plan
from trainer.plan.footprint.activations import FLOAT32_BYTES, compute_bytes, reduced_bytes
from trainer.plan.footprint.weights import Unit, is_factored, power_sgd_numel, rank_units

__all__ = ["CollectiveCall", "rank_traffic", "sends_per_microbatch"]

_MIB = 2**20
_COUNT_BYTES = 8  # int64
_INT8_BLOCK = 256
"""Numbers per scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One kind of collective in one step of one rank."""

    dimension: str
    """Mesh dimension: dp_replicate, dp_shard, ep, cp, tp, pp, or several such as dp_shard+ep; `host` for the bus to the
    host."""
    op: str
    """all_reduce | all_gather | reduce_scatter | broadcast | all_to_all | send | copy."""
    what: str
    size: int
    """Members of the group."""
    calls: int
    num_bytes: int
    """Bytes of all calls of a step, as recorded."""
    overlaps: str = ""
    """Phase that can hide the call: backward | compute (forward and backward); empty if a rank always waits for it."""

    @property
    def bus_bytes(self) -> float:
        """Bytes that a ring sends over each link, or the size of a sent message."""
        n = self.size
        factor = {
            "all_reduce": 2 * (n - 1) / n,
            "all_gather": n - 1,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "broadcast": 1.0,
            "send": 1.0,
            "copy": 1.0,
        }[self.op]
        return factor * self.num_bytes


def rank_traffic(config: Config, plan: Plan, *, pp_rank: int) -> list[CollectiveCall]:
    """Collectives of one training step without evaluation, checkpoints and probes."""
    units = rank_units(config, plan, pp_rank)
    calls = [
        *_data_parallel(config, plan, units),
        *_muon(config, units),
        *_tensor_parallel(config, plan, pp_rank),
        *_context_parallel(config, plan, pp_rank),
        *_expert_parallel(config, plan, pp_rank),
        *_pipeline(config, plan, pp_rank),
    ]
    if config.parallel.cpu_offload == "optimizer":
        own = FLOAT32_BYTES * sum(unit.own for unit in units)
        calls.append(
            CollectiveCall(dimension="host", op="copy", what="gradients and updates", size=1,
                 calls=2 * sum(len(unit.weights) for unit in units), num_bytes=2 * own, overlaps="")
        )  # fmt: skip
    return [call for call in calls if call.num_bytes]


def _data_parallel(config: Config, plan: Plan, units: list[Unit]) -> list[CollectiveCall]:
    kind = plan.data_parallel_kind
    if kind == "ddp":
        return _replicas(config, plan, units)
    calls: list[CollectiveCall] = []
    for dimension in dict.fromkeys(unit.dimension for unit in units) if kind != "none" else ():
        calls += _shards(config, plan, dimension, [unit for unit in units if unit.dimension == dimension])
    if kind == "hsdp":
        calls.append(
            CollectiveCall(dimension="dp_replicate", op="all_reduce", what="gradients' shards", size=plan.dp_replicate,
                 calls=len(units),
                 num_bytes=reduced_bytes(config) * sum(unit.own for unit in units), overlaps="backward")
        )  # fmt: skip
    return calls


def _muon(config: Config, units: list[Unit]) -> list[CollectiveCall]:
    """Gathers of Muon's updates: one whole matrix in float32 for each sharded matrix."""
    if config.optim.name != "muon":
        return []
    (dimension, shards, tp), *others = {(unit.dimension, unit.shards, unit.tp) for unit in units}
    assert not others, "only experts are shared by fewer ranks"
    matrices = [matrix for unit in units for matrix in unit.matrices]
    own = FLOAT32_BYTES * sum(matrix.numel(tp, shards) for matrix in matrices)
    groups = [(dimension, shards, own), ("tp", tp, own * shards)]
    return [
        CollectiveCall(dimension=dim, op="all_gather", what="updates of matrices", size=size, calls=len(matrices),
             num_bytes=num_bytes)
        for dim, size, num_bytes in groups if size > 1
    ]  # fmt: skip


def _replicas(config: Config, plan: Plan, units: list[Unit]) -> list[CollectiveCall]:
    """Reductions of DDP's buckets, and ZeRO-1's broadcasts of updated parameters."""
    parallel, size = config.parallel, plan.dp_replicate
    numel = sum(unit.whole for unit in units)
    buckets = math.ceil(FLOAT32_BYTES * numel / (parallel.ddp_bucket_mb * _MIB))
    num_calls, num_bytes, what = buckets, FLOAT32_BYTES * numel, "gradients"
    if parallel.gradient_compression in ("fp16", "bf16"):
        num_bytes, what = 2 * numel, f"gradients in {parallel.gradient_compression}"
    elif parallel.gradient_compression == "powersgd":
        left, right = power_sgd_numel(units, parallel.powersgd_rank)
        whole = sum(weight.numel() for unit in units for weight in unit.weights
                    if not is_factored(weight, parallel.powersgd_rank))  # fmt: skip
        num_calls, num_bytes, what = 3 * buckets, FLOAT32_BYTES * (left + right + whole), "gradients' factors"
    calls = [
        CollectiveCall(
            dimension="dp_replicate", op="all_reduce", what=what, size=size, calls=num_calls, num_bytes=num_bytes,
            overlaps="backward")
    ]  # fmt: skip
    if parallel.gradient_compression in ("int8", "topk"):
        calls = _with_error_feedback(
            config, size, buckets, [weight.numel(unit.tp) for unit in units for weight in unit.weights]
        )
    if plan.zero1:
        calls.append(
            CollectiveCall(dimension="dp_replicate", op="broadcast", what="updated parameters", size=size, calls=size,
                 num_bytes=FLOAT32_BYTES * numel)
        )  # fmt: skip
    return calls


def _with_error_feedback(config: Config, size: int, buckets: int, sizes: list[int]) -> list[CollectiveCall]:
    """Exchanges of compressed gradients: with int8 an all-to-all of parts and a gather of means, with top-k a gather of
    each replica's largest numbers (`trainer.parallel.sparse_hooks`)."""
    if config.parallel.gradient_compression == "topk":
        sent = 2 * FLOAT32_BYTES * round(sum(sizes) * config.parallel.topk_ratio)
        exchanges = [("all_gather", "largest gradients", sent)]
    else:
        blocks = size * sum(math.ceil(numel / (size * _INT8_BLOCK)) for numel in sizes)
        sent = blocks * (_INT8_BLOCK + FLOAT32_BYTES)
        exchanges = [("all_to_all", "gradients in int8", sent), ("all_gather", "means in int8", sent // size)]
    return [
        CollectiveCall(dimension="dp_replicate", op=op, what=what, size=size, calls=buckets, num_bytes=num_bytes,
             overlaps="")
        for op, what, num_bytes in exchanges
    ]  # fmt: skip


def _shards(config: Config, plan: Plan, dimension: str, units: list[Unit]) -> list[CollectiveCall]:
    """FSDP's gathers and reductions over one mesh dimension, and copies to and from the host."""
    shards, low = units[0].shards, compute_bytes(config)
    keeps = plan.pp > 1 or not config.parallel.reshard_after_forward
    # The root stays gathered between forward and backward. In a pipeline all units do, also between microbatches.
    passes = 1 if plan.pp > 1 else plan.num_microbatches
    gathers = [passes if keeps or unit.layer is None else 2 * passes for unit in units]
    calls = []
    if shards > 1:
        rounded = any(weight.gathers_float8 for unit in units for weight in unit.weights)
        own = [unit.gathered_bytes(low, shards) * count for unit, count in zip(units, gathers, strict=True)]
        calls.append(
            CollectiveCall(dimension=dimension, op="all_gather", what="parameters in fp8" if rounded else "parameters",
                 size=shards, calls=sum(gathers), num_bytes=sum(own), overlaps="compute")
        )  # fmt: skip
        times = plan.num_microbatches if config.parallel.reduce_every_microbatch else 1
        reduced = reduced_bytes(config) * shards * sum(unit.own for unit in units)
        calls.append(
            CollectiveCall(dimension=dimension, op="reduce_scatter", what="gradients", size=shards,
                 calls=times * len(units), num_bytes=times * reduced, overlaps="backward")
        )  # fmt: skip
    if plan.offloads_parameters:
        copied = [unit.own * (count + 1) for unit, count in zip(units, gathers, strict=True)]
        calls.append(
            CollectiveCall(
                 dimension="host", op="copy", what="parameters and gradients", size=1, calls=sum(gathers) + len(units),
                 num_bytes=FLOAT32_BYTES * sum(copied), overlaps="compute")
        )  # fmt: skip
    return calls


def _tensor_parallel(config: Config, plan: Plan, pp_rank: int) -> list[CollectiveCall]:
    if plan.tp == 1:
        return []
    own, last = plan.stages.of_rank[pp_rank], plan.stages.count - 1
    layers = _num_layers(plan, pp_rank)
    low = compute_bytes(config)
    # Bytes of one whole activation of the residual stream, over all microbatches of a step.
    whole = plan.local_batch_size * config.data.seq_len // plan.cp * config.model.dim * low
    count = plan.num_microbatches
    # The embedding's partial sums are reduced once, and the head reads the residual stream once. Recomputation stops
    # before the block's last reduction, because nothing in backward needs its result.
    recomputed = _recomputed_layers(config, plan, pp_rank)
    ends = int(0 in own) + int(last in own)
    experts = bool(config.model.num_experts)
    if config.parallel.sequence_parallel:
        # Attention and feed-forward each gather and scatter once, and backward does the reverse of both. Experts use
        # the rank's part without a gather, so for them recomputation repeats only attention's gather and scatter.
        gathers, scatters = 4 * layers + 2 * recomputed + ends, 4 * layers + recomputed + ends
        if experts:
            gathers, scatters = 2 * layers + recomputed + ends, 2 * layers + recomputed + ends
        reduces = 0
    else:
        # Backward sums the input's gradient for each of the five matrices that are split by columns. Experts have none
        # of these; their output, and the gradient of their input, is gathered from the ranks' parts.
        reduces = (4 if experts else 7) * layers + recomputed + ends
        gathers, scatters = 2 * layers if experts else 0, 0
    return [
        CollectiveCall(dimension="tp", op=op, what="activations", size=plan.tp, calls=times * count,
             num_bytes=times * num_bytes)
        for op, times, num_bytes in (
            ("all_gather", gathers, whole // plan.tp),
            ("reduce_scatter", scatters, whole),
            ("all_reduce", reduces, whole),
        )
    ]  # fmt: skip


def _context_parallel(config: Config, plan: Plan, pp_rank: int) -> list[CollectiveCall]:
    """Traffic of keys and values of the whole sequence in each layer, and of their gradients. They are gathered, or
    passed from rank to rank in a ring."""
    if plan.cp == 1:
        return []
    model = config.model
    layers, count = _num_layers(plan, pp_rank), plan.num_microbatches
    # Recomputation needs the keys and values of all ranks again.
    gathers = layers + _recomputed_layers(config, plan, pp_rank)
    width = 2 * model.kv_heads * (model.dim // model.num_heads) // plan.tp
    numel = plan.local_batch_size * config.data.seq_len * width
    whole = numel * compute_bytes(config)
    if config.parallel.cp_exchange == "ring":
        # All pieces are passed around in forward and in backward. In backward, their float32 gradients are passed on
        # with them, and in the end return to the rank of the piece.
        passes, steps = (gathers + layers) * (plan.cp - 1), layers * plan.cp
        return [
            CollectiveCall(dimension="cp", op="send", what="keys and values", size=plan.cp, calls=passes * count,
                 num_bytes=passes * whole // plan.cp, overlaps="compute"),
            CollectiveCall(dimension="cp", op="send", what="their gradients", size=plan.cp, calls=steps * count,
                 num_bytes=steps * numel * FLOAT32_BYTES // plan.cp),
        ]  # fmt: skip
    return [
        CollectiveCall(dimension="cp", op="all_gather", what="keys and values", size=plan.cp, calls=gathers * count,
             num_bytes=gathers * whole // plan.cp),
        CollectiveCall(dimension="cp", op="reduce_scatter", what="their gradients", size=plan.cp, calls=layers * count,
             num_bytes=layers * whole),
    ]  # fmt: skip


def _expert_parallel(config: Config, plan: Plan, pp_rank: int) -> list[CollectiveCall]:
    """Traffic of tokens to their experts and back, in forward and in backward. If ranks have pieces of sequences, also
    of the experts' counts per piece."""
    model = config.model
    if not model.num_experts:
        return []
    layers, recomputed = _num_layers(plan, pp_rank), _recomputed_layers(config, plan, pp_rank)
    exchanges, tokens = 4 * layers + 2 * recomputed, config.data.seq_len // (plan.cp * plan.tp)
    rows = plan.local_batch_size * tokens * model.experts_per_token * min(1.0, model.capacity_factor or 1)
    counts = _COUNT_BYTES * plan.local_batch_size * model.num_experts
    calls = (
        ("all_to_all", "tokens", "ep", exchanges, round(rows * model.dim * compute_bytes(config))),
        ("all_gather", "experts' counts", "cp", layers + recomputed, counts),
    )
    found = []
    for op, what, dim, times, num_bytes in calls:
        used = {each: plan.sizes[each] for each in (dim, "tp") if plan.sizes[each] > 1}
        if used:
            found.append(
                CollectiveCall(dimension="+".join(used), op=op, what=what, size=math.prod(used.values()),
                     calls=times * plan.num_microbatches, num_bytes=times * num_bytes)
            )  # fmt: skip
    return found


def _num_layers(plan: Plan, pp_rank: int) -> int:
    return sum(len(plan.stages.layers[stage]) for stage in plan.stages.of_rank[pp_rank])


def _recomputed_layers(config: Config, plan: Plan, pp_rank: int) -> int:
    kind, every = config.train.activation_checkpointing, config.train.checkpoint_every_n
    own = [layer for stage in plan.stages.of_rank[pp_rank] for layer in plan.stages.layers[stage]]
    if kind == "full":
        return len(own)
    return sum(1 for layer in own if layer % every == 0) if kind == "every_n" else 0


def sends_per_microbatch(plan: Plan, pp_rank: int) -> dict[int, int]:
    """Number of messages per microbatch to each other pipeline rank: activations to the next stage, gradients to the
    previous."""
    number = {stage: rank for rank, stages in enumerate(plan.stages.of_rank) for stage in stages}
    sends: dict[int, int] = {}
    for stage in plan.stages.of_rank[pp_rank]:
        for other in (stage + 1, stage - 1):
            if number.get(other, pp_rank) != pp_rank:
                sends[number[other]] = sends.get(number[other], 0) + 1
    return sends


def _pipeline(config: Config, plan: Plan, pp_rank: int) -> list[CollectiveCall]:
    if plan.pp == 1:
        return []
    low = compute_bytes(config) if plan.data_parallel_kind in ("fsdp", "hsdp") else FLOAT32_BYTES
    split = plan.tp if config.parallel.sequence_parallel else 1
    message = plan.micro_batch_size * (config.data.seq_len // (split * plan.cp)) * config.model.dim * low
    calls = sum(sends_per_microbatch(plan, pp_rank).values()) * plan.num_microbatches
    return [
        CollectiveCall(dimension="pp", op="send", what="activations and their gradients", size=plan.pp, calls=calls,
             num_bytes=calls * message)
    ]  # fmt: skip
