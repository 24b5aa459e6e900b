"""Number of ranks that read the same tokens: members of one pipeline-, tensor- or context-parallel group.

tokens = sum_over_ranks / token_copies(store)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analyzers.source import Source
from probes.settings.described import ParallelFacts
from probes.settings.section import read

__all__ = ["token_copies"]


def token_copies(source: Source, manifest: Mapping[str, Any] | None = None) -> int:
    """Number of ranks that read the same tokens; 1 if the mesh is unknown.

    The store of one node has the mesh coordinates of that node's ranks only. With several nodes, pass the manifest,
    which has the whole mesh.
    """
    parallel = read(ParallelFacts, manifest or {})
    planned = math.prod(int(max(1, size or 1)) for size in (parallel.pp, parallel.tp, parallel.cp))
    if not source.has("ranks"):
        return planned
    ((copies,),) = source.rows(
        "SELECT (coalesce(max(pp), 0) + 1) * (coalesce(max(tp), 0) + 1) * (coalesce(max(cp), 0) + 1) FROM ranks "
        "WHERE rank >= 0"
    )
    return max(planned, int(copies or 1))
