"""Gradient reductions in int8, or of the largest values only, with error feedback.

    mean, error = reduce_int8(corrected, sizes, group)     # `sizes`: numbers of elements of the bucket's parameters
    mean, error = reduce_largest(corrected, group, ratio=0.01)
    # `mean` is the same on all ranks; `error` is what this rank's compression lost

* int8: sums of int8 overflow, so each rank reduces one part of each parameter. Every rank sends each other rank that
  rank's part, in int8 with a float32 scale per 256 numbers. The receiver sums in float32, rounds the mean in the same
  way and sends it to all. For any number of ranks, this takes a quarter of the bytes of a float32 all-reduce. Each
  parameter is padded to 256 numbers per rank. A rank's error is the rounding error of the numbers that it sends, plus N
  times the rounding error of its parts of the mean. The factor is the number N of ranks, by which errors are divided
  later.
* top-k: every rank sends the fraction `ratio` of the bucket's numbers that are largest in magnitude, with their
  positions. The other numbers are its error. All ranks sum all lists in rank order. The traffic grows by 8 bytes per
  number and rank, so a ratio of 1 % saves bytes only below a hundred ranks.

Both work in place and reuse their temporaries, because a bucket may be the whole gradient. All ranks get
the same bytes and process them in the same order, so results are bitwise equal on all ranks and in each run. In the
first step of a process, DDP forms other buckets. int8 does not depend on the buckets, so a restart changes no bit.
Top-k does, because it chooses the largest numbers of each bucket. NaN and Inf stay visible: int8 makes their 256
numbers NaN, and top-k sends them first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["largest_count", "reduce_int8", "reduce_largest"]

BLOCK = 256
"""Numbers per scale."""
_SCALE_BYTES = 4
_LEVELS = 127

# `all_gather_single` is the name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_int8(corrected: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the mean of `corrected` (flat, float32) over the group, and the error of this rank. The caller adds the
    error to the rank's next gradient. The mean overwrites `corrected`."""
    size = group.size()
    rows = _rows(corrected, sizes, size)
    sent = _packed(rows)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    error = rows.sub_(_unpacked(sent))
    del sent, rows
    mean = _unpacked(received).sum(0).div_(size)
    del received
    own = _packed(mean.unsqueeze(0))
    error[group.rank()] += (mean - _unpacked(own)[0]) * size
    everywhere = own.new_empty(size, own.shape[1])
    _all_gather(everywhere, own, group=group)
    del mean, own
    _flatten(_unpacked(everywhere), sizes, into=corrected)
    del everywhere
    return corrected, _flatten(error, sizes, into=torch.empty_like(corrected))


def _part(numel: int, size: int) -> int:
    """How many numbers of a parameter each rank reduces, rounded up to whole blocks."""
    return -(-numel // (size * BLOCK)) * BLOCK


def _rows(flat: Tensor, sizes: Sequence[int], size: int) -> Tensor:
    """Return (ranks, numbers): in row r the parts of all parameters that rank r reduces, padded with zeros."""
    parts = [_part(numel, size) for numel in sizes]
    rows, at = flat.new_zeros(size, sum(parts)), 0
    for own, part in zip(torch.split(flat, list(sizes)), parts, strict=True):
        padded = torch.nn.functional.pad(own, (0, size * part - own.numel()))
        rows[:, at : at + part] = padded.view(size, part)
        at += part
    return rows


def _flatten(rows: Tensor, sizes: Sequence[int], *, into: Tensor) -> Tensor:
    """The reverse of `_rows`; returns `into`."""
    parts = torch.split(rows, [_part(numel, len(rows)) for numel in sizes], dim=1)
    for own, part in zip(torch.split(into, list(sizes)), parts, strict=True):
        own.copy_(part.flatten()[: own.numel()])
    return into


def _packed(rows: Tensor) -> Tensor:
    """Pack (rows, numbers) float32 as bytes. Each row is packed as its numbers in int8, followed by their scales."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / _LEVELS
    # Avoid a division by 0 for a block of zeros. A NaN stays in the scale, and so reaches every number of the block.
    levels = blocks / scales.where(scales != 0, 1.0)
    levels = levels.round_().nan_to_num_(0.0).clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    return torch.cat((levels.view(len(rows), -1).view(torch.uint8), scales.squeeze(-1).view(torch.uint8)), dim=1)


def _unpacked(packed: Tensor) -> Tensor:
    count = packed.shape[1] // (BLOCK + _SCALE_BYTES) * BLOCK
    levels = packed[:, :count].contiguous().view(torch.int8).view(len(packed), -1, BLOCK)
    scales = packed[:, count:].contiguous().view(torch.float32).unsqueeze(-1)
    # Inf times zero is NaN, so a block that had Inf is entirely non-finite and is noticed.
    return levels.float().mul_(scales).view(len(packed), -1)


def largest_count(count: int, ratio: float) -> int:
    """How many numbers of a bucket of `count` a rank sends."""
    return max(1, round(count * ratio))


def reduce_largest(corrected: Tensor, group: dist.ProcessGroup, *, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the mean over the group of each rank's largest numbers, and the numbers that this rank did not send.
    `corrected` is overwritten."""
    size = group.size()
    # `topk` treats NaN as largest, so a bad gradient is sent and noticed.
    places = corrected.abs().topk(largest_count(corrected.numel(), ratio), sorted=False).indices
    own = torch.stack((corrected[places].view(torch.int32), places.to(torch.int32)))
    everywhere = own.new_empty(size, *own.shape)
    _all_gather(everywhere.view(-1, own.shape[1]), own, group=group)
    mean = torch.zeros_like(corrected)
    for numbers, at in everywhere:
        mean.index_add_(0, at.long(), numbers.view(torch.float32))
    return mean.div_(size), corrected.index_fill_(0, places, 0.0)
