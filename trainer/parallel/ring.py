"""Ring attention: keys and values are passed around the ranks of a sequence, and no rank ever holds all of them.

    mixed = ring_attention(query, key, value, group)       # (batch, heads, piece, head_dim), of this rank's piece

Liu et al. 2023 (arXiv 2310.01889): a rank attends to one piece of keys and values after the other, while it sends the
piece on. It joins the results by the logarithm of the softmax's sum in each row (online softmax). Backward passes the
pieces around once more, each with its gradient, to which every rank adds. A rank keeps its own queries, keys, values,
results and one logarithm per row; two more pieces exist in transit.

With contiguous pieces a causal mask would leave the first rank nearly idle and give the last most of the work. So a
sequence is divided into twice as many chunks as there are ranks, and rank r has chunk r and chunk 2 x size - 1 - r
(Brandon et al. 2023, arXiv 2311.09431). Then each step except the first needs no mask on any rank: it is one half of
the queries against all keys, or all queries against one half of the keys.

The kernel is torch's flash attention, or memory-efficient attention for float32 on CUDA; both work block by block and
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
"""Memory-efficient attention pads its rows of logarithms to a multiple of this length."""


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
        mixed, logarithms = torch.zeros_like(query, dtype=torch.float32), None
        for step in range(group.size()):
            sending = _Sending.start(passing, group) if step < group.size() - 1 else None
            rows, columns = _halves(rank, (rank - step) % group.size(), half)
            keys, values = passing[:, :, :, columns].repeat_interleave(shared, dim=2)
            out, of_rows, random = _forward(query[:, :, rows], keys, values, is_causal=step == 0)
            if logarithms is None:
                # Copies, because a selective checkpoint keeps the kernel's results, which must not change.
                mixed, logarithms = out.to(torch.float32, copy=True), of_rows.clone()
            else:
                _join(mixed[:, :, rows], logarithms[:, :, rows], out, of_rows)
            if sending is not None:
                passing = sending.arrived()
        assert logarithms is not None
        result = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logarithms, *random)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mixed, logarithms, *random = ctx.saved_tensors
        group, half, shared = ctx.group, query.shape[2] // 2, query.shape[1] // key.shape[1]
        rank, size, outer = group.rank(), group.size(), grads[0].contiguous()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        passing = torch.stack((key, value))
        gradient = torch.zeros_like(passing, dtype=torch.float32)
        for step in range(size):
            sending = _Sending.start(passing, group) if step < size - 1 else None
            rows, columns = _halves(rank, (rank - step) % size, half)
            keys, values = passing[:, :, :, columns].repeat_interleave(shared, dim=2)
            parts = _backward(
                outer[:, :, rows],
                query[:, :, rows],
                keys,
                values,
                mixed[:, :, rows],
                logarithms[:, :, rows],
                random,
                is_causal=step == 0,
            )
            of_query[:, :, rows] += parts[0]
            for number in (0, 1):  # sum over the query heads that share a key or value head
                of_heads = parts[1 + number].float()
                together = of_heads.reshape(len(of_heads), -1, shared, *of_heads.shape[2:])
                gradient[number][:, :, columns] += together.sum(2)
            # The gradient travels with its keys and values, and is back at their rank after the last step.
            if size > 1:
                gradient = _Sending.start(gradient, group).arrived()
            if sending is not None:
                passing = sending.arrived()
        return of_query.to(query.dtype), gradient[0].to(key.dtype), gradient[1].to(value.dtype), None


def _halves(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """The queries of `rank` that attend to keys of `source`, and these keys. Except for `rank` itself, each query then
    attends to each key."""
    if source == rank:
        return slice(None), slice(None)
    if source < rank:
        return slice(None), slice(half)
    return slice(half, None), slice(None)


def _join(mixed: Tensor, logarithms: Tensor, out: Tensor, of_out: Tensor) -> None:
    """Merge attention to more keys into the attention of the same queries, in place."""
    together = torch.logaddexp(logarithms, of_out)
    mixed.mul_((logarithms - together).exp().unsqueeze(-1)).add_(out * (of_out - together).exp().unsqueeze(-1))
    logarithms.copy_(together)


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

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return attention, the logarithm of the softmax's sum for each row, and the dropout state that CUDA's backward
    requires."""
    if query.device.type == "cpu":
        out, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
        return out, logarithms.float(), ()
    if query.dtype == torch.float32:
        out, logarithms, *random = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal
        )
        return out, logarithms[:, :, : query.shape[2]].contiguous(), random
    found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
    return found[0], found[1], found[6:8]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logarithms: Tensor,
    random: Sequence[Tensor],
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `logarithms` are for attention to all keys."""
    given = (grad, query, key, value, out, logarithms)
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal)
    elif query.dtype == torch.float32:
        padded = F.pad(logarithms, (0, -logarithms.shape[2] % _ALIGNED_ROWS))
        wanted = [True, True, True, False]
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, padded, *random, 0.0, wanted, is_causal
        )
    else:
        sizes = (None, None, query.shape[2], key.shape[2])  # no ragged batch: all sequences have one length
        gradients = _aten._scaled_dot_product_flash_attention_backward(*given, *sizes, 0.0, is_causal, *random)
    return gradients[0], gradients[1], gradients[2]
