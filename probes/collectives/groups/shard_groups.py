"""Text with the ranks that together hold a sharded tensor; empty if this rank holds all of it.

    ranks_of_parts(parameter)        # "4 of 0-3": a DTensor that four ranks share, or a norm of it not yet reduced
    ranks_of_fsdp1(models)           # {id of a parameter: "2 of 0,1"}

All of these ranks get the same text, without communication.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

__all__ = ["FSDP1", "ranks_of_fsdp1", "ranks_of_parts"]

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_MAX_LISTED = 24
_known: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()
"""Cache of texts by mesh and placements. Each step needs them for its norms, and torch builds a mesh's tensor at each
access.
"""


def ranks_of_parts(tensor: Any) -> str:
    """Ranks along the mesh dimensions on which a DTensor is not replicated; empty for a replicated or plain tensor."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None:
        return ""
    known = _known.setdefault(mesh, {})
    if (ranks := known.get(placements)) is None:
        known[placements] = ranks = _sharing_ranks(mesh, placements)
    return ranks


def _sharing_ranks(mesh: Any, placements: Sequence[Any]) -> str:
    if (place := mesh.get_coordinate()) is None:
        return ""
    pairs = zip(placements, place, strict=True)
    index = tuple(at if placement.is_replicate() else slice(None) for placement, at in pairs)
    return _text(mesh.mesh[index].flatten().tolist())


def ranks_of_fsdp1(models: Iterable[nn.Module]) -> dict[int, str]:
    """Ranks by the id of each parameter that FSDP1 shards."""
    module = sys.modules.get(FSDP1)
    if module is None:
        return {}
    found: dict[int, str] = {}
    for part in itertools.chain.from_iterable(model.modules() for model in models):
        if not isinstance(part, module.FullyShardedDataParallel) or part._handle is None:
            continue
        if not part._handle.uses_sharded_strategy:
            continue
        ranks = _text(dist.get_process_group_ranks(part.process_group))
        flat = part._handle.flat_param
        for parameter in (flat, *(getattr(flat, "_params", None) or ())):
            found[id(parameter)] = ranks
    return found


def _text(ranks: Sequence[int]) -> str:
    listed = sorted(ranks)
    if len(listed) < 2:
        return ""
    steps = {after - before for before, after in itertools.pairwise(listed)}
    if len(steps) == 1 and len(listed) > 2:
        step = steps.pop()
        return f"{len(listed)} of {listed[0]}-{listed[-1]}" + (f" by {step}" if step > 1 else "")
    rest = ",..." if len(listed) > _MAX_LISTED else ""
    return f"{len(listed)} of {','.join(map(str, listed[:_MAX_LISTED]))}{rest}"
