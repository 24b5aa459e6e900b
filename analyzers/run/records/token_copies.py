"""Number of ranks that read the same tokens: members of one pipeline-, tensor- or context-parallel group.

tokens = sum_over_ranks / token_copies(store)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analyzers.source import Source, lacking
from probes.settings.described import ParallelFacts
from probes.settings.section import read

__all__ = ["token_copies"]


def token_copies(source: Source, manifest: Mapping[str, Any] | None = None) -> int:
    """Number of ranks that read the same tokens; 1 if the mesh is unknown.

    Some ranks may have no records here, so a dimension is as large as its process groups, whose members every rank
    records. The manifest has the whole mesh, too.
    """
    parallel = read(ParallelFacts, manifest or {})
    planned = math.prod(int(max(1, size or 1)) for size in (parallel.pp, parallel.tp, parallel.cp))
    if not source.has("ranks"):
        return planned
    (extents,) = source.rows("SELECT max(pp) + 1, max(tp) + 1, max(cp) + 1 FROM ranks WHERE rank >= 0")
    sizes = _group_sizes(source)
    named = zip(("pp", "tp", "cp"), extents, strict=True)
    return max(planned, math.prod(max(extent, sizes.get(name, 1)) for name, extent in named if extent))


def _group_sizes(source: Source) -> dict[str, int]:
    """Members of the largest process group of each dimension of the mesh."""
    if lacking(source, process_groups=("process_group", "members")):
        return {}
    sql = "SELECT split_part(process_group, ':', 1), max(len(members)) FROM process_groups WHERE rank >= 0 GROUP BY 1"
    return {str(name): int(size or 1) for name, size in source.rows(sql)}
