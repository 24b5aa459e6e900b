"""A large run is looked at ahead: what its other pages will ask first is computed while somebody reads the first one.

    look_ahead(access)              # once for each run; does nothing for a run whose pages are quick anyway

One question at a time, so that those of the page that is open are never kept waiting for more than one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from .access import LARGE_BYTES, RunAccess

__all__ = ["look_ahead"]

PATIENCE_S = 120.0
_looked: set[str] = set()


def look_ahead(access: RunAccess) -> None:
    """Begin to ask, if the run is large and nobody has begun."""
    name = str(access.run.path)
    if name in _looked or access.size_bytes() < LARGE_BYTES:
        return
    _looked.add(name)
    threading.Thread(target=_ask_all, args=(access,), name="look-ahead", daemon=True).start()


def _ask_all(access: RunAccess) -> None:
    from . import queries
    from .views import collectives, memory, numerics, overview, pipeline, ranks  # they import the frame

    questions: tuple[tuple[Callable[..., Any], tuple[Hashable, ...]], ...] = (
        (overview.load_lines, ()),
        (ranks.load_matrix, ("own work",)),
        (ranks.load_ranks, ()),
        (memory.load_memory, ()),
        (numerics.load_numerics, ()),
        (queries.extent, ()),
        (collectives.load_calls, ()),
        (pipeline.load_pipelines, ()),
        (ranks.load_matrix, ("step time",)),
    )
    for load, parameters in questions:
        access.ask(load, *parameters, first_s=PATIENCE_S)
