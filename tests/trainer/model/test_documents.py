"""Attention within documents: in blocks of queries it is that under one mask, and the square never exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import transformer
from trainer.model.transformer import document_attention, document_numbers

SEQ, SEPARATOR = 96, 7


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return out


def inputs(seq: int = SEQ, heads: int = 4, width: int = 8) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(20, (2, seq))
    parts = [torch.randn(2, count, seq, width, requires_grad=True) for count in (heads, heads // 2, heads // 2)]
    return parts, document_numbers(tokens, SEPARATOR)


def test_a_separator_belongs_to_the_document_that_it_ends() -> None:
    tokens = torch.tensor([[1, 7, 2, 3, 7, 7, 4]])
    assert document_numbers(tokens, SEPARATOR).tolist() == [[0, 0, 1, 1, 1, 2, 3]]


@pytest.mark.parametrize("rows", [16, 40, SEQ, 1000])
def test_blocks_of_queries_give_what_one_mask_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "DOCUMENT_ROWS", rows)
    parts, numbers = inputs()
    mask = (numbers.unsqueeze(2) == numbers.unsqueeze(1)) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*parts, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    expected.square().sum().backward()
    gradients = [part.grad for part in parts]
    again, _ = inputs()
    mixed = document_attention(*again, numbers)
    mixed.square().sum().backward()
    torch.testing.assert_close(mixed, expected)
    for part, gradient in zip(again, gradients, strict=True):
        torch.testing.assert_close(part.grad, gradient, rtol=1e-4, atol=1e-5)


def test_nothing_is_as_large_as_the_square_of_a_sequence() -> None:
    seq = 8 * transformer.DOCUMENT_ROWS
    parts, numbers = inputs(seq, heads=2, width=4)
    with Largest() as largest:
        document_attention(*parts, numbers).sum().backward()
    assert largest.numel <= 2 * transformer.DOCUMENT_ROWS * seq
    with torch.no_grad(), Largest() as largest:
        document_attention(*parts, numbers)
    assert largest.numel <= 2 * transformer.DOCUMENT_ROWS * seq
