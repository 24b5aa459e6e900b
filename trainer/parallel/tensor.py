"""Tensor parallelism as in Megatron: columns, then rows, so that each branch of a block communicates once.

    query, key, value, gate, up    split by output (columns): no communication
    out, down                      split by input (rows): partial sums, one reduction
    experts                        whole, some on each rank; the router on all (`trainer.parallel.expert`)
    embed, head                    split by vocabulary
    norms and residuals            split along the sequence if `sequence_parallel`, else the same on every rank

Experts get the rank's part of the sequence, even if `sequence_parallel` is off. With `loss_parallel` the logits stay
split by vocabulary: instead of gathering them, cross-entropy exchanges one maximum and one sum per token.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.config.config import ParallelConfig
from trainer.model.experts import MixtureOfExperts
from trainer.model.transformer import Block, Transformer

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
        assert isinstance(block, Block)
        mlp = _experts_plan(sequence) if isinstance(block.mlp, MixtureOfExperts) else _feed_forward_plan(sequence)
        _parallelize(block, mesh, _attention_plan(sequence) | mlp)
    model.tie()


def _attention_plan(sequence: bool) -> dict[str, ParallelStyle]:
    residual = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=residual),
    }
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            # One gather of the input for all layers that read it: three in attention, two in the feed-forward layer.
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            ),
        }
    return plan


def _feed_forward_plan(sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
    }
    if sequence:
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return plan


def _experts_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Tensor-parallel styles for a mixture of experts, which gets the rank's part of the sequence as plain tensors."""
    own = (Shard(1),)
    if sequence:
        return {"mlp": PrepareModuleInput(input_layouts=own, desired_input_layouts=own, use_local_output=True)}
    whole = (Replicate(),)
    style = PrepareModuleInputOutput(
        input_layouts=whole, desired_input_layouts=own, use_local_input=True,
        output_layouts=own, desired_output_layouts=whole,
    )  # fmt: skip
    return {"mlp": style}


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)
