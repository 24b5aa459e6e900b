"""Readable label of a process group, the same on all its members.

>>> compact_ranks([0, 1, 2, 3])
'0-3'
>>> compact_ranks([0, 4, 8, 12])
'0-12/4'
>>> group_label("mesh_tp", [4, 5])
'tp:4-5'
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

__all__ = ["compact_ranks", "group_label"]

MAX_LISTED = 4  # longest list of ranks without a pattern; longer ones are hashed
_DESCRIPTIONS = {"default_pg": "world", "undefined": "group", "": "group"}


def group_label(description: str, ranks: Sequence[int]) -> str:
    """`<mesh dimension or description>:<ranks>`; torch's default descriptions become `world` or `group`."""
    kind = _DESCRIPTIONS.get(description, description.removeprefix("mesh_"))
    return f"{kind.replace(':', '_')}:{compact_ranks(ranks)}"


def compact_ranks(ranks: Sequence[int]) -> str:
    """`3`, `0-3` (all), `0-12/4` (every fourth), `0,1,5`, or `n=17@ab12cd` (number and hash of the ranks)."""
    if len(ranks) == 1:
        return str(ranks[0])
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(steps) == 1 and (step := steps.pop()) > 0 and (step == 1 or len(ranks) > 2):
        return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    if len(ranks) <= MAX_LISTED:
        return ",".join(map(str, ranks))
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:6]
    return f"n={len(ranks)}@{digest}"
