"""Context parallelism: each rank of a `cp` group has a shard of every sequence, and attends to all shards.

Everything in a block except attention works token by token. It needs only the rank's shard, so activations shrink by
the size of the group. Attention gathers the keys and values of the whole sequence, as in the training of Llama 3 (Llama
Team 2024, section 3.3.2), and masks the positions after each query. Backward reduce-scatters the gradients. With
grouped-query attention, keys and values are a fraction of the activations, so little is sent.

With `parallel.cp_exchange = "ring"` the shards of keys and values are passed around instead (`trainer.parallel.ring`),
so that the keys and values on a rank also shrink with the number of ranks. torch's own ring attention
(`torch.distributed.tensor.experimental.context_parallel`) has kernels for CUDA only (torch 2.13), and replaces
`scaled_dot_product_attention` globally; the kernels called here are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.model.transformer import Attention, Transformer
from trainer.parallel.ring import ring_attention

__all__ = ["apply_context_parallel"]

# torch 2.13 has new names for these functions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def apply_context_parallel(
    model: Transformer, mesh: DeviceMesh, chunks: tuple[int, ...], num_chunks: int, *, is_ring: bool
) -> None:
    """Make `model` process this rank's `chunks` of each sequence. `mesh`: one-dimensional mesh of the ranks that
    share a sequence.
    """
    group = mesh.get_group()
    model.chunks, model.num_chunks, model.is_ring = chunks, num_chunks, is_ring
    for module in model.modules():
        if not isinstance(module, Attention):
            continue
        if is_ring:
            module.ring = lambda query, key, value: ring_attention(query, key, value, group)
        else:
            module.gather = lambda shard: _gathered(shard, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
def _gathered(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the shards (..., seq / cp, head_dim) of all ranks as (..., seq, head_dim)."""
    whole: Tensor = _Gather.apply(shard, group)  # type: ignore[no-untyped-call]  # torch: no types
    return whole


class _Gather(torch.autograd.Function):
    """Gather all shards along the second-to-last dimension. In backward, sum a shard's gradient over all ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        first = shard.movedim(-2, 0).contiguous()
        whole = first.new_empty(first.shape[0] * group.size(), *first.shape[1:])
        _all_gather(whole, first, group=group)
        return whole.movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].movedim(-2, 0).contiguous()
        shard = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        _reduce_scatter(shard, whole, group=ctx.group)
        return shard.movedim(0, -2), None
