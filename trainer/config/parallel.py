"""`[parallel]`: how the ranks share the work."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.section import Section

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    dp_replicate: int = Field(default=1, ge=-1)
    """Replicas (DDP, or HSDP with `dp_shard`); -1 = as many as the ranks allow."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2); -1 = as many as there are."""
    tp: int = Field(default=1, ge=1)
    """Ranks that share every layer (tensor parallel)."""
    cp: int = Field(default=1, ge=1)
    """Ranks that share every sequence, each with a piece of it (context parallel)."""
    cp_exchange: Literal["gather", "ring"] = "gather"
    """With cp: each rank gathers the keys and values of the whole sequence, or ranks pass them around piece by
    piece."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel: `ep` x `tp` ranks share each layer's experts; ranks along `ep` read different sequences."""
    pp: int = Field(default=1, ge=1)
    """Pipeline ranks; each holds some of the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = "1f1b"
    """Order of the pipeline's microbatches."""
    stages_per_rank: int = Field(default=0, ge=0)
    """Pipeline stages on a rank; 0 = 1, or 2 for the interleaved and ZBV schedules."""
    stage_costs: list[float] = Field(default_factory=list)
    """Cost of each layer (any unit), for balancing stages; empty = equal layers."""
    reshard_after_forward: bool = True
    """FSDP frees gathered parameters after forward (ZeRO-3); false keeps them until backward (ZeRO-2)."""
    reduce_every_microbatch: bool = False
    """FSDP reduces gradients after each microbatch, which needs less memory and more reductions (HSDP's replicas are
    reduced after the last microbatch)."""
    reduce_dtype: Literal["float32", "bf16"] = "float32"
    """Type in which FSDP sends and sums gradients."""
    float8_all_gather: bool = False
    """With `train.float8 = "tensorwise"`: FSDP gathers the matrices in fp8."""
    cpu_offload: Literal["none", "optimizer", "all"] = "none"
    """State in host memory (CUDA only): `optimizer` offloads AdamW's moments; `all` offloads parameters, gradients and
    moments by FSDP2, even with dp_shard = 1."""
    sequence_parallel: bool = True
    """With tp: norms and residuals are split along the sequence."""
    async_tp: bool = False
    """With tp, sequence_parallel and train.compile: torch splits matmuls and their collectives into pieces that overlap
    (symmetric memory; CUDA only)."""
    loss_parallel: bool = True
    """With tp: logits stay split along the vocabulary in the loss."""
    ddp_bucket_mb: float = Field(default=25.0, gt=0, le=1e6)
    """Size of DDP's gradient buckets (MiB)."""
    gradient_as_bucket_view: bool = True
    """DDP's gradients are views into its buckets, which saves a copy."""
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd", "int8", "topk"] = "none"
    """How DDP sends gradients: unchanged, with half or a quarter of the bits, as low-rank matrices, or the largest
    numbers only."""
    topk_ratio: float = Field(default=0.01, gt=0, le=0.5)
    """Share of the numbers that `topk` sends; each number takes 8 bytes."""
    powersgd_rank: int = Field(default=4, ge=1)
    """Rank of PowerSGD's matrices: higher is closer to the gradient, and sends more."""
    powersgd_start: int = Field(default=100, ge=2)
    """Steps with uncompressed gradients before PowerSGD begins."""
    zero1: bool = False
    """With DDP: shard the optimizer state over the replicas (ZeRO-1)."""
    prefetch_blocks: int = Field(default=0, ge=0, le=8)
    """Blocks that FSDP explicitly gathers ahead; 0 = FSDP's implicit prefetch of one."""

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the layout; None if it takes as many as there are."""
        sizes = (self.dp_replicate, self.dp_shard, self.tp, self.cp, self.ep, self.pp)
        return None if -1 in sizes else math.prod(sizes)

    @field_validator("cpu_offload", mode="before")
    @classmethod
    def _accept_bool(cls, value: object) -> object:
        """Accept true and false, as recorded before 0.1.0."""
        return {True: "all", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_free_dimension(self) -> ParallelConfig:
        for key in ("dp_replicate", "dp_shard"):
            if getattr(self, key) == 0:
                raise ValueError(f"parallel.{key} = 0: must be 1 or more, or -1 to fill up")
        if self.dp_replicate == -1 and self.dp_shard == -1:
            raise ValueError("parallel.dp_replicate = -1: only one of dp_replicate and dp_shard can be -1")
        return self
