"""Sharded parameters, gradients and optimizer state with torch's FSDP2 (`fully_shard`), HSDP on a 2-D mesh.

Each block is one communication unit; experts divided among ranks are a separate unit. The rest (embedding, last
norm, head) belongs to the root.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainer.config.config import ParallelConfig
from trainer.model.experts import MixtureOfExperts
from trainer.model.transformer import Transformer

__all__ = ["apply_fsdp"]


def apply_fsdp(
    model: Transformer,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    compute_dtype: torch.dtype,
    pipelined: bool,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard `model` in place over `mesh`: (dp_shard), or (dp_replicate, dp_shard) for HSDP.

    Gradients are reduced in `config.reduce_dtype` whatever `compute_dtype` is. In a pipeline parameters stay gathered
    between microbatches, because gathering them again for each would cost more than the memory is worth. With
    `config.cpu_offload = "all"` the caller must fill the shards in host memory, on any device.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if compute_dtype != torch.float32 else None,
        reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32,
        # Token IDs are integers, which are not cast. The loss computes its softmax in float32.
        cast_forward_inputs=True,
        output_dtype=None,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload == "all" else OffloadPolicy()
    )
    reshard = config.reshard_after_forward and not pipelined
    for block in model.blocks.values():
        if expert_mesh is not None:
            assert isinstance(block.mlp, MixtureOfExperts)
            fully_shard(
                block.mlp.experts,
                mesh=expert_mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=reshard,
                # Expert parallelism has already split the first dimension.
                shard_placement_fn=lambda _: Shard(1),
            )
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    # Backward needs the root's parameters first, so they stay gathered after forward, as by torch's default.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    if config.prefetch_blocks:
        _prefetch(list(model.blocks.values()), config.prefetch_blocks)


def _prefetch(blocks: list[torch.nn.Module], ahead: int) -> None:
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, number - ahead) : number][::-1])
