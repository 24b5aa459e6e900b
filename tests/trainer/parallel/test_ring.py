"""Ring attention: each rank has two chunks of a sequence, and gets what the whole would give it, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.processes import run_ranks
from trainer.parallel.ring import _halves, ring_attention

pytestmark = pytest.mark.timeout(180)

CHUNK = 8


def piece_chunks(rank: int, size: int) -> tuple[int, int]:
    """Chunks of a rank, out of 2 x `size` equal ones per sequence, in the order of their tokens."""
    return rank, 2 * size - 1 - rank


def differences(rank: int, world_size: int) -> dict[str, float]:
    """From attention to the whole sequence, with one key for two queries: of result and gradients."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    seq = 2 * world_size * CHUNK
    whole = [torch.randn(2, heads, seq, 16, requires_grad=True) for heads in (4, 2, 2)]
    outer = torch.randn(2, 4, seq, 16)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(outer)

    def own(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.detach().chunk(2 * world_size, 2)[c] for c in piece_chunks(rank, world_size)], 2)

    pieces = [own(tensor).requires_grad_() for tensor in whole]
    saved: list[int] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        mixed = ring_attention(*pieces, group)
    mixed.backward(own(outer))
    found = {"mixed": (mixed - own(expected)).abs().max().item(), "kept": float(sum(saved))}
    for name, piece, tensor in zip(("query", "key", "value"), pieces, whole, strict=True):
        assert piece.grad is not None
        assert tensor.grad is not None
        found[name] = (piece.grad - own(tensor.grad)).abs().max().item()
    return found


def test_results_and_gradients_are_those_of_the_whole_sequence() -> None:
    for found in run_ranks(differences, world_size=4, deadline_s=150):
        kept = found.pop("kept")
        assert all(value < 1e-5 for value in found.values()), found
        # Of this rank's tokens: queries and results of four heads, keys and values of two, a logarithm a row and head.
        assert kept == 2 * (2 * CHUNK) * (2 * 4 * 16 + 2 * 2 * 16 + 4)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_does_the_same_work_in_each_step_and_none_is_left_out(size: int) -> None:
    seen = torch.zeros(2 * size, 2 * size, dtype=torch.int)
    for rank in range(size):
        own = torch.tensor(piece_chunks(rank, size))
        for source in range(size):
            rows, columns = _halves(rank, source, 1)
            queries, keys = own[rows], torch.tensor(piece_chunks(source, size))[columns]
            if source != rank:
                assert len(queries) * len(keys) == 2
                seen[queries[:, None], keys] += 1
    diagonal: Any = torch.zeros_like(seen)
    for rank in range(size):  # with a causal mask within
        early, late = piece_chunks(rank, size)
        diagonal[late, early] = 1
    assert torch.equal(seen + diagonal, torch.ones_like(seen).tril(-1))
