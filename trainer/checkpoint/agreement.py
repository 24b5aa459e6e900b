"""Small collectives by which all ranks reach the same decision. Every function here is collective.

first_error(error)           # "" if no rank has one: all succeed or all fail
from_rank_0(value)           # a plain JSON value of rank 0
summed([1.0, 0.0], device)   # element by element, over all ranks
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["first_error", "from_rank_0", "gather_from_all", "summed"]


def gather_from_all(value: Any) -> list[Any]:
    """Return the JSON value of every rank, in rank order."""
    if not _distributed():
        return [value]
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, json.dumps(value))
    return [json.loads(text) for text in texts]


def first_error(error: str) -> str:
    """Return the error of the lowest rank with an error, prefixed with the rank's number; empty if no rank has one."""
    for rank, message in enumerate(gather_from_all(error)):
        if message:
            return f"rank {rank}: {message}"
    return ""


def from_rank_0(value: Any) -> Any:
    """Return the value that rank 0 passes in; other ranks' values are ignored."""
    if not _distributed():
        return value
    texts = [json.dumps(value) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(texts, src=0)
    return json.loads(texts[0] or "null")


def summed(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum each of the numbers over all ranks."""
    if not _distributed():
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(row)
    sums: list[float] = row.tolist()
    return sums


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
