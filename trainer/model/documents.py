"""Attention within packed documents, without a mask of the sequence's square.

    numbers = document_numbers(tokens, separator)                       # (batch, seq): of which document a token is
    mixed = document_attention(query, key, value, numbers)             # causal, and within a document

A block of queries at a time attends to the keys up to its last, under the mask of that block; backward makes it again.
So what exists at once is a block's rows, and nothing of it is kept: the price is that backward computes attention once
more, where there is more than one block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["document_attention", "document_numbers"]

ROWS = 512
"""Queries of a block."""


def document_numbers(tokens: Tensor, separator: int) -> Tensor:
    """Number of the document of each token, within its sequence. A separator belongs to the document that it ends."""
    ends = tokens == separator
    return ends.cumsum(dim=1, dtype=torch.int32) - ends.int()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
def document_attention(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor) -> Tensor:
    """(batch, heads, seq, head_dim) of each; fewer heads of `key` and `value` are shared by several of `query`."""
    seq = query.shape[2]
    if seq <= ROWS:
        return _rows(query, key, value, numbers, numbers, 0)
    parts = []
    for start in range(0, seq, ROWS):
        stop = min(start + ROWS, seq)
        given = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
        of = (numbers[:, start:stop], numbers[:, :stop], start)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_rows, *given, *of, use_reentrant=False))
        else:
            parts.append(_rows(*given, *of))
    return torch.cat(parts, dim=2)


def _rows(query: Tensor, key: Tensor, value: Tensor, own: Tensor, others: Tensor, start: int) -> Tensor:
    same = own.unsqueeze(2) == others.unsqueeze(1)
    earlier = torch.ones_like(same[0]).tril(start)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=(same & earlier).unsqueeze(1), enable_gqa=query.shape[1] != key.shape[1]
    )
