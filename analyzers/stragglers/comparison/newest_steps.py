"""Times of a slow rank and of its peers in its newest slow steps, from the spans of its host.

own, usual = in_newest_steps(source, attempt, slow, peers, read)       # both empty without peers or without spans
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source
from analyzers.stragglers.comparison.peer_comparison import Straggler

__all__ = ["in_newest_steps"]

Read = Callable[[Source, int, Sequence[int], int, int], dict[str, float]]


def in_newest_steps(
    source: Source, attempt: int, slow: Straggler, peers: Sequence[int], read: Read
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the results of `read(source, attempt, ranks, first_step, last_step)` for the rank and for its peers."""
    others = [rank for rank in peers if rank != slow.rank]
    if not (slow.has_peers and slow.cause == "compute" and others and source.has("spans")):
        return {}, {}
    first = max(slow.first_step, slow.last_step - NEWEST_STEPS)
    own, usual = (read(source, attempt, ranks, first, slow.last_step) for ranks in ([slow.rank], others))
    return own, usual
