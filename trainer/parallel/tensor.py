"""Tensor parallelism as in Megatron: columns, then rows, so that each branch of a block communicates once.

    query, key, value, gate, up    split by output (columns): no communication
    out, down                      split by input (rows): partial sums, one reduction
    embed, head                    split by vocabulary
    norms and residuals            split along the sequence if `sequence_parallel`, else the same on every rank

With `loss_parallel` the logits stay split by vocabulary, and cross-entropy exchanges one maximum and one sum a token
instead of gathering them.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.config.config import ParallelConfig
from trainer.model.transformer import Transformer

__all__ = ["apply_tensor_parallel"]


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Turn the parameters of `model` into DTensors on the one-dimensional `mesh`, in place and without communication.

    Every rank already holds the same full parameters, hence `src_data_rank=None`.
    """
    sequence = config.sequence_parallel
    residual = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
    if model.norm is not None and model.head is not None:
        if sequence:
            plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if config.loss_parallel else Replicate(),
            use_local_output=not config.loss_parallel,
        )
    _parallelize(model, mesh, plan)
    for block in model.blocks.values():
        _parallelize(block, mesh, _block_plan(sequence))
    model.tie()


def _block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    residual = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=residual),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=residual),
    }
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            # One gather for the three (two) layers that read it, not one for each.
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    return plan


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)
