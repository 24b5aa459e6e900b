"""Which weights a rank holds: the model's parameters by communication unit, from the configuration alone.

    units = rank_units(config, plan, pp_rank=0)     # the blocks of the rank's stages, then the root
    sum(unit.numel(tp=plan.tp) for unit in units)   # parameters that its tensor-parallel share has

A unit is what FSDP gathers and reduces in one call: a block, or the root with embedding, last norm and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Config, ModelConfig
from trainer.mesh_plan import Plan

__all__ = ["Unit", "Weight", "block_weights", "rank_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter."""

    rows: int
    row_numel: int
    split: str = ""
    """What tensor parallelism splits: rows | columns | nothing."""

    def numel(self, tp: int = 1, shard: int = 1) -> int:
        """Elements on one rank. FSDP splits rows, and its first ranks have the larger parts: this is theirs."""
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

    def numel(self, tp: int = 1, shard: int = 1) -> int:
        return sum(weight.numel(tp, shard) for weight in self.weights)


def block_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Of one transformer block."""
    head_dim = model.dim // model.num_heads
    columns = [model.num_heads * head_dim, model.kv_heads * head_dim, model.kv_heads * head_dim]
    return (
        *(Weight(rows=rows, row_numel=model.dim, split="rows") for rows in columns),
        Weight(rows=model.dim, row_numel=model.num_heads * head_dim, split="columns"),
        *(Weight(rows=model.ffn_dim, row_numel=model.dim, split="rows") for _ in ("gate", "up")),
        Weight(rows=model.dim, row_numel=model.ffn_dim, split="columns"),
        *(Weight(rows=model.dim, row_numel=1) for _ in ("attention_norm", "mlp_norm")),
    )


def rank_units(config: Config, plan: Plan, pp_rank: int) -> list[Unit]:
    """Of all stages of the pipeline rank, in the order of forward; the root comes last."""
    model, stages = config.model, plan.stages
    own = stages.of_rank[pp_rank]
    units = [Unit(layer=layer, weights=block_weights(model)) for stage in own for layer in stages.layers[stage]]
    vocabulary = Weight(rows=model.vocab_size, row_numel=model.dim, split="rows")
    root: list[Weight] = []
    if 0 in own:
        root.append(vocabulary)
    if stages.count - 1 in own:
        root.append(Weight(rows=model.dim, row_numel=1))
        if not (model.tie_embeddings and 0 in own):
            root.append(vocabulary)
    return [*units, Unit(layer=None, weights=tuple(root))] if root else units
