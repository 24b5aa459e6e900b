"""Number of ranks that count the same tokens: members of one pipeline, tensor- or context-parallel group.

tokens = sum_over_ranks / token_copies(store)
"""

from __future__ import annotations

from analyzers.source import Source

__all__ = ["token_copies"]


def token_copies(source: Source) -> int:
    """Ranks that read the same text; 1 where the mesh is not known."""
    if not source.has("ranks"):
        return 1
    ((copies,),) = source.rows(
        "SELECT (coalesce(max(pp), 0) + 1) * (coalesce(max(tp), 0) + 1) * (coalesce(max(cp), 0) + 1) FROM ranks "
        "WHERE rank >= 0"
    )
    return int(copies or 1)
