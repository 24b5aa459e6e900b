"""Ring attention: keys and values are passed around the ranks of a sequence, and no rank ever holds all of them.

    mixed = ring_attention(query, key, value, group)       # (batch, heads, piece, head_dim), of this rank's piece

Liu et al. 2023 (arXiv 2310.01889): a rank attends to one piece of keys and values after the other. Meanwhile it sends
the piece on. It merges the results by each row's log-sum-exp (online softmax). In the backward pass the pieces go
around again, each with its gradient, and every rank adds to the gradient. A rank keeps its own queries, keys, values,
results and one log-sum-exp per row. Two more pieces exist in transit.

With contiguous pieces, a causal mask would leave the first rank nearly idle and give the last most of the work. So a
sequence is divided into twice as many chunks as there are ranks. Rank r has chunk r and chunk 2 x size - 1 - r (Brandon
et al. 2023, arXiv 2311.09431). Then only the first step needs a mask. Every other step computes one half of the queries
against all keys, or all queries against one half of the keys.

The kernel is torch's flash attention, or memory-efficient attention for float32 on CUDA. Both work block by block and
never materialise the attention matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ring_attention"]

_aten = torch.ops.aten
_ALIGNED_ROWS = 32
"""Memory-efficient attention pads its rows of log-sum-exp to a multiple of this length."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence. Collective. `key` and `value` may have fewer heads
    than `query` (grouped-query attention)."""
    mixed: Tensor = _Ring.apply(query, key, value, group)  # type: ignore[no-untyped-call]  # torch: no types
    return mixed


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, half = group.rank(), query.shape[2] // 2
        shared = query.shape[1] // key.shape[1]
        passing = torch.stack((key, value))
        mixed, lse = torch.zeros_like(query, dtype=torch.float32), None
        for step in range(group.size()):
            sending = _Sending.start(passing, group) if step < group.size() - 1 else None
            rows, columns = _halves(rank, (rank - step) % group.size(), half)
            keys, values = passing[:, :, :, columns].repeat_interleave(shared, dim=2)
            out, block_lse, random = _forward(query[:, :, rows], keys, values, is_causal=step == 0)
            if lse is None:
                # Copy the kernel's results: selective checkpointing keeps them, so they must not change below.
                mixed, lse = out.to(torch.float32, copy=True), block_lse.clone()
            else:
                _merge(mixed[:, :, rows], lse[:, :, rows], out, block_lse)
            if sending is not None:
                passing = sending.wait()
        assert lse is not None
        result = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse, *random)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mixed, lse, *random = ctx.saved_tensors
        group, half, shared = ctx.group, query.shape[2] // 2, query.shape[1] // key.shape[1]
        rank, size, grad_out = group.rank(), group.size(), grads[0].contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        passing = torch.stack((key, value))
        gradient = torch.zeros_like(passing, dtype=torch.float32)
        for step in range(size):
            sending = _Sending.start(passing, group) if step < size - 1 else None
            rows, columns = _halves(rank, (rank - step) % size, half)
            keys, values = passing[:, :, :, columns].repeat_interleave(shared, dim=2)
            parts = _backward(
                grad_out[:, :, rows],
                query[:, :, rows],
                keys,
                values,
                mixed[:, :, rows],
                lse[:, :, rows],
                random,
                is_causal=step == 0,
            )
            grad_query[:, :, rows] += parts[0]
            for number in (0, 1):  # sum over the query heads that share a key or value head
                of_heads = parts[1 + number].float()
                by_group = of_heads.reshape(len(of_heads), -1, shared, *of_heads.shape[2:])
                gradient[number][:, :, columns] += by_group.sum(2)
            # The gradient travels with its keys and values, and is back at their rank after the last step.
            if size > 1:
                gradient = _Sending.start(gradient, group).wait()
            if sending is not None:
                passing = sending.wait()
        return grad_query.to(query.dtype), gradient[0].to(key.dtype), gradient[1].to(value.dtype), None


def _halves(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """The queries of `rank` that attend to keys of `source`, and these keys. Except for `rank` itself, each query then
    attends to each key."""
    if source == rank:
        return slice(None), slice(None)
    if source < rank:
        return slice(None), slice(half)
    return slice(half, None), slice(None)


def _merge(mixed: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge attention to more keys into the attention of the same queries, in place."""
    merged = torch.logaddexp(lse, out_lse)
    mixed.mul_((lse - merged).exp().unsqueeze(-1)).add_(out * (out_lse - merged).exp().unsqueeze(-1))
    lse.copy_(merged)


class _Sending:
    """A tensor being sent to the next rank, while the previous rank's tensor is received."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works

    @classmethod
    def start(cls, tensor: Tensor, group: dist.ProcessGroup) -> _Sending:
        rank, size = group.rank(), group.size()
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
        return cls(sent, received, dist.batch_isend_irecv(operations))

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return attention, each row's log-sum-exp, and the dropout state that CUDA's backward requires."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
        return out, lse.float(), ()
    if query.dtype == torch.float32:
        out, lse, *random = _aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)
        return out, lse[:, :, : query.shape[2]].contiguous(), random
    found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
    return found[0], found[1], found[6:8]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `lse` are for attention to all keys."""
    given = (grad, query, key, value, out, lse)
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal)
    elif query.dtype == torch.float32:
        padded = F.pad(lse, (0, -lse.shape[2] % _ALIGNED_ROWS))
        wanted = [True, True, True, False]
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, padded, *random, 0.0, wanted, is_causal
        )
    else:
        sizes = (None, None, query.shape[2], key.shape[2])  # all sequences have the same length, so no offsets
        gradients = _aten._scaled_dot_product_flash_attention_backward(*given, *sizes, 0.0, is_causal, *random)
    return gradients[0], gradients[1], gradients[2]
