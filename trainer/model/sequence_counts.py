"""Counts of a whole sequence where each rank has a piece of it.

earlier, whole = sequence_counts(counts, group)     # of the pieces before this rank's, and of all; collective
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["sequence_counts", "sequence_scores"]

# torch 2.13 has a new name for it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sequence_scores(scores: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """From the scores of this rank's piece of each sequence, (batch, length, n), to those of all, piece after piece."""
    if group is None:
        return scores
    pieces = scores.new_empty(group.size(), *scores.shape)
    _all_gather(pieces.flatten(0, 1), scores.contiguous(), group=group)
    return pieces.movedim(0, 1).flatten(1, 2)


def sequence_counts(counts: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """From the counts of this rank's piece of each sequence, (batch, n), to those of the pieces before it and of all.

    The pieces lie in the order of the group's ranks. Without a group the piece is the whole. A few numbers a sequence:
    all ranks get all of them, and none has to wait for the ranks before it one after the other.
    """
    if group is None:
        return torch.zeros_like(counts), counts
    pieces = counts.new_empty(group.size(), *counts.shape)
    _all_gather(pieces.flatten(0, 1), counts.contiguous(), group=group)
    return pieces[: group.rank()].sum(0), pieces.sum(0)
