"""Memory of a rank, part by part, and its peak.

    need = rank_memory(config, plan, pp_rank=0, device="cuda")
    need.parameters, need.gradients, need.optimizer, need.gathered, need.activations     # bytes
    need.peak                                                                            # bytes

Adam in this trainer is float32 throughout: 4 bytes for a parameter, 4 for its gradient, 8 for its two moments. ZeRO
(Rajbhandari et al. 2020, arXiv 1910.02054) counts the same 16 bytes per parameter as 2 + 2 + 12: low-precision
parameters and gradients, and float32 moments with a master copy. Muon keeps one moment per matrix,
AdamW8bit two moments of a byte per number. This trainer's low-precision copies count as gathered parameters, which are
freed again.

The peak is less than the sum of the parts: when all gradients exist, the activations are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.config.config import Config
from trainer.layout.constraints import CODES_BLOCK
from trainer.layout.plan import Plan
from trainer.plan.footprint.activations import (
    FLOAT32_BYTES,
    Device,
    SavedActivation,
    compute_bytes,
    is_recomputed,
    reduced_bytes,
    saved_per_token,
)
from trainer.plan.footprint.backward import Block, UnitBytes, backward_peak
from trainer.plan.footprint.weights import Unit, Weight, largest_share, power_sgd_numel, rank_units

__all__ = ["RankMemory", "in_flight", "rank_memory", "worst_rank_memory"]

_CONTEXT_BYTES = {"cpu": 0, "cuda": 10**9}
"""CUDA context, cuBLAS workspaces and NCCL's buffers: between 0.5 and 1.5 GB on today's devices; not measured here."""
_WORKSPACE_BYTES = 64 << 20
"""Part of the context that torch's allocator provides: cuBLAS workspaces of 32 MiB per thread on Hopper and newer (8
MiB on older GPUs), for the threads of forward and backward."""
_REDUCING = {"int8": 2.75, "topk": 2.0}
"""Bytes that a reduction with error feedback needs per byte of its bucket. int8: the corrected gradient, its rounded
copy, and the numbers sent and received. topk: the corrected gradient and the mean."""
_CODED_BYTES = 1 + FLOAT32_BYTES / CODES_BLOCK
"""Bytes per element of an 8-bit moment: its code, and its share of the block's scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Maximum of the full parameters gathered by FSDP, or of autocast's low-precision copies."""
    activations: int
    """Activations that forward keeps for backward, over all microbatches in flight."""
    working: int
    """Gradients of the logits, a recomputed block, and full gradients before their reduction."""
    compression: int
    """Additional memory for compressed gradients."""
    context: int
    host: int
    """Parameters, gradients and moments in host memory with `parallel.cpu_offload`, in addition to the device's
    memory."""
    peak: int
    num_parameters: int
    """Number of parameters on this rank."""

    @property
    def allocated(self) -> int:
        """The peak as in torch's `max_memory_allocated`, which excludes the driver's context and NCCL's buffers."""
        return self.peak - self.context + min(self.context, _WORKSPACE_BYTES)

    @property
    def sum(self) -> int:
        """Sum of all parts: the need if nothing were ever freed."""
        parts = (self.parameters, self.gradients, self.optimizer, self.gathered, self.activations, self.working)
        return sum(parts) + self.compression + self.context


def worst_rank_memory(config: Config, plan: Plan, device: Device) -> RankMemory:
    """Memory of the rank that needs most; in a pipeline usually the first (microbatches in flight) or the last
    (logits)."""
    needs = [rank_memory(config, plan, pp_rank=rank, device=device) for rank in range(plan.pp)]
    return max(needs, key=lambda need: need.peak)


def in_flight(schedule: str, *, pp: int, pp_rank: int, microbatches: int, stages_per_rank: int) -> int:
    """A pipeline rank holds the activations of at most this many forward passes (of one stage) at the same time.

    1f1b: p - r, the number of ranks from this one to the last (Narayanan et al. 2019). Interleaved with v stages per
    rank: 2 (p - r - 1) + (v - 1) p + 1 (Narayanan et al. 2021). Zero-bubble schedules are limited to the memory of
    1f1b's first rank, p x v (Qi et al. 2024).
    """
    if pp == 1:
        return 1
    every = microbatches * stages_per_rank
    if schedule == "gpipe":
        return every
    if schedule == "1f1b":
        return min(every, pp - pp_rank)
    if schedule == "interleaved_1f1b":
        return min(every, 2 * (pp - pp_rank - 1) + (stages_per_rank - 1) * pp + 1)
    return min(every, pp * stages_per_rank)


def rank_memory(config: Config, plan: Plan, *, pp_rank: int, device: Device) -> RankMemory:
    units = rank_units(config, plan, pp_rank)
    own, full = _by_layer(units, lambda unit: unit.own), _by_layer(units, lambda unit: unit.whole)
    held = FLOAT32_BYTES * sum(own.values())
    by_fsdp = plan.data_parallel_kind in ("fsdp", "hsdp")
    saved = saved_per_token(config, plan, device)
    gathered = _gathered(config, plan, units)
    tokens = plan.micro_batch_size * config.data.seq_len // plan.cp
    layers = [round(tokens * saved.of_layer(layer, config)) for layer in own if layer is not None]
    stages = len(plan.stages.of_rank[pp_rank])
    flights = in_flight(
        plan.schedule, pp=plan.pp, pp_rank=pp_rank, microbatches=plan.num_microbatches, stages_per_rank=stages
    )
    outside = round(tokens * _outside_blocks(saved, plan, pp_rank))
    # Each forward pass in flight keeps the activations of one stage. The logits are counted once, because the last
    # stage's backward frees them soon, except under gpipe.
    activations = flights * sum(layers) // stages + outside * (
        flights if plan.pp > 1 and plan.schedule == "gpipe" else 1
    )
    has_loss = plan.stages.count - 1 in plan.stages.of_rank[pp_rank]
    loss = round(tokens * saved.loss_backward) if has_loss else 0
    # Additional activations during a block's backward: recomputed ones, and gradients of activations.
    extra = [round(tokens * (saved.block + saved.block_backward)) - layer for layer in layers]
    # Unreduced gradients of each block.
    blocks = [FLOAT32_BYTES * numel for layer, numel in full.items() if layer is not None]
    largest = max(blocks, default=0) if by_fsdp else 0
    working = max(loss, max(extra, default=0) + largest)
    accumulates = plan.num_microbatches > 1
    # FSDP keeps the gradients of all but the last microbatch unsharded: one reduction instead of many.
    keeps_whole = by_fsdp and accumulates and not config.parallel.reduce_every_microbatch
    gradients = reduced_bytes(config) * sum(full.values()) if keeps_whole else held
    offloaded = plan.offloads_parameters and device == "cuda"
    if plan.pp > 1:
        alive = gathered + activations + working + gradients
    else:
        alive = _peak_without_pipeline(config, plan, units, saved, device, activations + loss, is_offloaded=offloaded)
    optimizer, step = 2 * held, 0
    if config.optim.name == "muon":
        optimizer -= FLOAT32_BYTES * sum(w.numel(u.tp, u.shards) for u in units for w in u.matrices)
        step = max(_muon_step(unit, weight) for unit in units for weight in unit.matrices)
    elif config.optim.name == "adamw8bit":
        coded = [weight.numel(unit.tp, unit.shards) for unit in units for weight in unit.coded]
        optimizer -= 2 * round((FLOAT32_BYTES - _CODED_BYTES) * sum(coded))
        step = 3 * FLOAT32_BYTES * max(coded, default=0)  # both moments, and the update of a matrix
    if plan.zero1:
        optimizer = 2 * FLOAT32_BYTES * largest_share(units, plan.dp_replicate)
    errors, reducing = _compression(config, plan, units)
    on_host = 0
    if config.parallel.cpu_offload == "optimizer" and device == "cuda":
        on_host, optimizer = 2 * optimizer, 0  # the host holds the moments, and buffers for gradients and updates
        step = 2 * FLOAT32_BYTES * max((w.numel(u.tp, u.shards) for u in units for w in u.weights), default=0)
    state = held + optimizer
    if offloaded:
        # The device holds a block's shard while the block is gathered, and its reduced gradients until they are copied.
        state = 2 * max((FLOAT32_BYTES * numel for layer, numel in own.items() if layer is not None), default=0)
    # With a single bucket, the hook runs after backward, when only the model's state is left. With several buckets,
    # the first hook runs before most of backward, when the activations still exist.
    at_hook = reducing + (held if FLOAT32_BYTES * sum(full.values()) <= _bucket_bytes(config) else alive)
    peak = state + errors + _CONTEXT_BYTES[device] + max(alive, at_hook, 0 if offloaded else held + step)
    return RankMemory(
        pp_rank=pp_rank,
        parameters=0 if offloaded else held,
        gradients=0 if offloaded and not keeps_whole else gradients,
        optimizer=0 if offloaded else optimizer,
        gathered=gathered,
        activations=activations,
        working=working,
        compression=errors + reducing,
        context=_CONTEXT_BYTES[device],
        host=held + held + optimizer if offloaded else on_host,
        peak=peak,
        num_parameters=held // FLOAT32_BYTES,
    )


def _by_layer(units: list[Unit], numel: Callable[[Unit], int]) -> dict[int | None, int]:
    """{layer: elements or bytes of the block with its experts}. The root's layer is None; it comes last, as in
    `units`."""
    found: dict[int | None, int] = {}
    for unit in units:
        found[unit.layer] = found.get(unit.layer, 0) + numel(unit)
    return found


def _muon_step(unit: Unit, matrix: Weight) -> int:
    """Bytes for the update of one matrix. In float32: the new momentum, the update, and the whole update if it is
    gathered. In bf16: two tensors of the matrix's size, and two square ones with its short side."""
    whole, own = matrix.numel(), matrix.numel(unit.tp, unit.shards)
    gathered = whole if own < whole else 0
    short = min(matrix.rows, matrix.row_numel)
    return FLOAT32_BYTES * (2 * own + gathered) + 2 * (2 * whole + 2 * short * short)


def _bucket_bytes(config: Config) -> int:
    return int(config.parallel.ddp_bucket_mb * 2**20)


def _compression(config: Config, plan: Plan, units: list[Unit]) -> tuple[int, int]:
    """Bytes of DDP's communication hook: the errors and factors that it keeps, and its temporary memory for a
    bucket."""
    kind = config.parallel.gradient_compression
    if plan.data_parallel_kind != "ddp" or kind == "none":
        return 0, 0
    numel = sum(unit.whole for unit in units)
    bucket = min(FLOAT32_BYTES * numel, _bucket_bytes(config))
    if kind == "powersgd":
        return FLOAT32_BYTES * (numel + sum(power_sgd_numel(units, config.parallel.powersgd_rank))), 0
    if kind in _REDUCING:
        return FLOAT32_BYTES * numel, round(_REDUCING[kind] * bucket)
    return 0, bucket // 2


def _peak_without_pipeline(
    config: Config,
    plan: Plan,
    units: list[Unit],
    saved: SavedActivation,
    device: Device,
    forward: int,
    *,
    is_offloaded: bool,
) -> int:
    """Peak bytes in addition to parameters and optimizer, in the last microbatch of a step; each microbatch runs
    forward and then backward. `forward`: activations at the end of forward, including the loss."""
    is_freed = plan.data_parallel_kind in ("fsdp", "hsdp") and config.parallel.reshard_after_forward
    tokens = plan.micro_batch_size * config.data.seq_len // plan.cp
    by_layer: dict[int | None, list[UnitBytes]] = {}
    for unit in units:
        found = by_layer.setdefault(unit.layer, [])
        is_within = bool(found)  # True for experts, which lie within the unit of their block
        found.append(_unit_bytes(config, plan, unit, is_within, device, is_freed=is_freed, is_offloaded=is_offloaded))
    (root,) = by_layer[None]
    blocks = []
    for layer, own in by_layer.items():
        if layer is None:
            continue
        by_forward, in_backward = saved.of_layer(layer, config), saved.block + saved.block_backward
        recomputes = is_recomputed(layer, config)
        at_inner = saved.block - saved.after_gather if recomputes else saved.block + saved.rows_gradient
        blocks.append(
            Block(
                kept=round(tokens * by_forward),
                backward_extra=round(tokens * (in_backward - by_forward)),
                at_inner=round(tokens * at_inner),
                around_inner=round(tokens * (saved.block - saved.experts + saved.rows_gradient)),
                is_recomputed=recomputes,
                units=tuple(own),
            )
        )
    before = root.before + sum(unit.before for block in blocks for unit in block.units)
    always = compute_bytes(config) * units[-1].whole if is_freed else _gathered(config, plan, units)
    ahead = max(1, config.parallel.prefetch_blocks)
    return always + max(forward + before, backward_peak(blocks, root, ahead=ahead))


def _unit_bytes(
    config: Config, plan: Plan, unit: Unit, is_within: bool, device: Device, *, is_freed: bool, is_offloaded: bool
) -> UnitBytes:
    sharded = plan.data_parallel_kind in ("fsdp", "hsdp")
    low, sent = compute_bytes(config), reduced_bytes(config)
    own = 0 if is_offloaded else FLOAT32_BYTES * unit.own
    accumulates = plan.num_microbatches > 1
    # FSDP computes gradients in the dtype of its gathers, and accumulates microbatches in the dtype of its reductions.
    width = low if sharded else FLOAT32_BYTES
    keeps_whole = sharded and not config.parallel.reduce_every_microbatch
    before = (sent * unit.whole if keeps_whole else own) if accumulates else 0
    is_gathered = is_freed and unit.layer is not None
    return UnitBytes(
        gathered=unit.gathered_bytes(low) if is_gathered else 0,
        buffer=unit.gathered_bytes(low) if is_gathered and unit.shards > 1 else 0,
        gradient=width * unit.whole,
        sent=sent * unit.shards * unit.own if sharded else 0,
        own=own,
        largest=width * max(weight.numel(unit.tp) for weight in unit.weights),
        first=width * max(weight.numel(unit.tp) // weight.matrices for weight in unit.weights),
        before=before,
        is_added_at_once=accumulates and (not sharded or (keeps_whole and low == sent)),
        is_split_inside=is_within and unit.shards > 1,
        is_copied=sharded and device == "cpu",
    )


def _outside_blocks(saved: SavedActivation, plan: Plan, pp_rank: int) -> float:
    """Bytes per token outside the blocks: embedding, head and loss, and activations sent to the next stage."""
    own, last = plan.stages.of_rank[pp_rank], plan.stages.count - 1
    sent = sum(saved.boundary for stage in own if stage != last) if plan.pp > 1 else 0.0
    return (saved.embedding if 0 in own else 0.0) + (saved.head if last in own else 0.0) + sent


def _gathered(config: Config, plan: Plan, units: list[Unit]) -> int:
    low = compute_bytes(config)
    sizes = _by_layer(units, lambda unit: unit.gathered_bytes(low))
    blocks = [size for layer, size in sizes.items() if layer is not None]
    root = sum(sizes.values()) - sum(blocks)
    if plan.data_parallel_kind in ("fsdp", "hsdp"):
        if plan.pp > 1 or not config.parallel.reshard_after_forward:
            return root + sum(blocks)
        # The current block with its experts, and the blocks gathered ahead of it, without theirs.
        first = {unit.layer: unit.gathered_bytes(low) for unit in reversed(units) if unit.layer is not None}
        ahead = sorted(first.values())[:-1][-max(1, config.parallel.prefetch_blocks) :]
        return root + max(blocks) + sum(ahead)
    # Autocast keeps its casts until backward has used them; norms and embedding are not cast.
    return root + sum(blocks) if low < FLOAT32_BYTES else 0
