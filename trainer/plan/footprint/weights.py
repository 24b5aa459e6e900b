"""Weights that a rank holds: the model's parameters by communication unit, from the configuration alone.

    units = rank_units(config, plan, pp_rank=0)     # the blocks of the rank's stages, then the root
    sum(unit.whole for unit in units)               # parameters of the rank's tensor- and expert-parallel share
    sum(unit.own for unit in units)                 # parameters that the rank keeps when nothing is gathered
    largest_share(units, num_ranks=4)               # parameters whose optimizer state one replica keeps under ZeRO-1

A unit is what FSDP gathers and reduces in one call: a block, a block's experts if they are divided among ranks, or the
root with embedding, last norm and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.config import Config, ModelConfig
from trainer.layout.constraints import CODES_BLOCK, FLOAT8_MULTIPLE
from trainer.layout.plan import Plan

__all__ = ["Unit", "Weight", "is_factored", "largest_share", "power_sgd_numel", "rank_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter."""

    rows: int
    row_numel: int
    split: str = ""
    """Dimension that tensor parallelism splits: "rows", "columns", or empty if it splits none."""
    decays: bool = True
    """True if the parameter has weight decay. Norms and the embedding have none, and are a separate parameter group."""
    matrices: int = 1
    """Number of matrices stacked in the parameter; their gradients are computed one after the other."""
    gathers_float8: bool = False
    """True if FSDP gathers the parameter in fp8."""

    def numel(self, tp: int = 1, shard: int = 1) -> int:
        """Number of elements on one rank. If FSDP has to split rows unevenly, this is the largest part, which the first
        ranks have."""
        rows, row = self.rows, self.row_numel
        if self.split == "rows":
            rows = -(-rows // tp)
        elif self.split == "columns":
            row = -(-row // tp)
        return -(-rows // shard) * row


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    layer: int | None
    """Number of the block; None: the root."""
    weights: tuple[Weight, ...]
    tp: int
    shards: int
    """Number of ranks that share the unit under FSDP."""
    dimension: str
    """Mesh dimension along which the unit is sharded."""

    @property
    def whole(self) -> int:
        """Number of elements when the unit is gathered."""
        return sum(weight.numel(self.tp) for weight in self.weights)

    @property
    def own(self) -> int:
        """Elements that stay on the rank."""
        return sum(weight.numel(self.tp, self.shards) for weight in self.weights)

    def gathered_bytes(self, width: int, shards: int = 1) -> int:
        """Bytes of the gathered unit, or of a rank's part of it; numbers that are not in fp8 take `width` bytes."""
        return sum(weight.numel(self.tp, shards) * (1 if weight.gathers_float8 else width) for weight in self.weights)

    @property
    def coded(self) -> list[Weight]:
        """Weights with 8-bit moments under AdamW8bit."""
        matrices = (weight for weight in self.weights if weight.decays and weight.row_numel > 1)
        return [weight for weight in matrices if weight.row_numel % CODES_BLOCK == 0]

    @property
    def matrices(self) -> list[Weight]:
        """Weights that Muon updates, if it is the optimizer."""
        return [weight for weight in self.weights if self.layer is not None and weight.row_numel > 1]


def rank_units(config: Config, plan: Plan, pp_rank: int) -> list[Unit]:
    """Units of all stages of the pipeline rank, in the order of forward; the root comes last."""
    model, stages = config.model, plan.stages
    own = stages.of_rank[pp_rank]
    sharded = plan.data_parallel_kind in ("fsdp", "hsdp")

    def unit(layer: int | None, weights: Sequence[Weight], *shared_by: str) -> Unit:
        used = {dim: plan.sizes[dim] for dim in shared_by or ("dp_shard", "ep", "cp") if plan.sizes[dim] > 1}
        shards = math.prod(used.values()) if sharded else 1
        if config.parallel.float8_all_gather and layer is not None:
            weights = [replace(each, gathers_float8=_gathers_float8(each, plan.tp, shards)) for each in weights]
        return Unit(
            layer=layer, weights=tuple(weights), tp=plan.tp, shards=shards, dimension="+".join(used) or "dp_shard"
        )

    units = []
    for layer in (layer for stage in own for layer in stages.layers[stage]):
        experts = _experts(model, plan.ep * plan.tp)
        if plan.ep * plan.tp == 1 or not experts:
            units.append(unit(layer, [*_block(model), *experts]))
        else:  # experts are already divided among ranks, so each is shared by fewer ranks than other parameters are
            units.append(unit(layer, _block(model)))
            units.append(unit(layer, experts, "dp_shard", "cp"))
    embedding = Weight(rows=model.vocab_size, row_numel=model.dim, split="rows", decays=False)
    root: list[Weight] = []
    if 0 in own:
        root.append(embedding)
    if stages.count - 1 in own:
        root.append(_norm(model))
        if not (model.tie_embeddings and 0 in own):
            root.append(Weight(rows=model.vocab_size, row_numel=model.dim, split="rows"))
    return [*units, unit(None, root)] if root else units


def largest_share(units: Sequence[Unit], num_ranks: int) -> int:
    """The largest number of elements for which one of `num_ranks` replicas keeps the optimizer state. torch assigns
    whole parameters, group by group and largest first, each to the rank with the fewest elements.
    """
    sizes = [0] * num_ranks
    for decays in (False, True):
        own = [weight.numel(unit.tp) for unit in units for weight in unit.weights if weight.decays == decays]
        for numel in sorted(own, reverse=True):
            sizes[sizes.index(min(sizes))] += numel
    return max(sizes)


def power_sgd_numel(units: Sequence[Unit], rank: int) -> tuple[int, int]:
    """Return the numbers of elements (left factors, right factors) of all matrices that PowerSGD compresses. It
    compresses a matrix if its two factors together have less than half of the matrix's elements.
    """
    left = right = 0
    for matrix in (weight for unit in units for weight in unit.weights):
        if is_factored(matrix, rank):
            left += matrix.rows * min(matrix.rows, matrix.row_numel, rank)
            right += matrix.row_numel * min(matrix.rows, matrix.row_numel, rank)
    return left, right


def is_factored(weight: Weight, rank: int) -> bool:
    """True if PowerSGD sends a parameter as two factors."""
    rank = min(weight.rows, weight.row_numel, rank)
    return 2 * rank * (weight.rows + weight.row_numel) < weight.rows * weight.row_numel


def _gathers_float8(weight: Weight, tp: int, shards: int) -> bool:
    """Return True for the matrices that `trainer.parallel.float8_gather` gathers: the matrices that tensor parallelism
    would split, if their sizes allow fp8."""
    fits = all(size % (FLOAT8_MULTIPLE * tp) == 0 for size in (weight.rows, weight.row_numel))
    rows = weight.rows // tp if weight.split == "rows" else weight.rows
    return bool(weight.split) and fits and rows % shards == 0


def _block(model: ModelConfig) -> list[Weight]:
    """Weights of one transformer block, without its experts."""
    head_dim = model.dim // model.num_heads
    columns = [model.num_heads * head_dim, model.kv_heads * head_dim, model.kv_heads * head_dim]
    attention = [Weight(rows=rows, row_numel=model.dim, split="rows") for rows in columns]
    attention.append(Weight(rows=model.dim, row_numel=model.num_heads * head_dim, split="columns"))
    if model.num_experts:
        feed_forward = [Weight(rows=model.num_experts, row_numel=model.dim)]  # the router
    else:
        feed_forward = [Weight(rows=model.ffn_dim, row_numel=model.dim, split="rows") for _ in ("gate", "up")]
        feed_forward.append(Weight(rows=model.dim, row_numel=model.ffn_dim, split="columns"))
    return [*attention, *feed_forward, _norm(model), _norm(model)]


def _experts(model: ModelConfig, holders: int) -> list[Weight]:
    """The stacked weights of a block's experts on one rank. FSDP splits the stack; if expert parallelism has split it
    already, FSDP splits the next dimension."""
    count, hidden, dim = model.num_experts // holders, model.expert_ffn_dim, model.dim
    if not count:
        return []
    if holders > 1:
        shapes = [(hidden, count * dim), (hidden, count * dim), (dim, count * hidden)]
    else:
        shapes = [(count, hidden * dim)] * 3
    matrices = count if model.expert_products == "loop" else 1
    return [Weight(rows=rows, row_numel=row_numel, matrices=matrices) for rows, row_numel in shapes]


def _norm(model: ModelConfig) -> Weight:
    return Weight(rows=model.dim, row_numel=1, decays=False)
