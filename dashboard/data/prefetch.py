"""Prefetch the first queries of the other pages of a large run.

    set_queries(((overview.load_lines, ()), ...))   # once: the loaders, in order of computation
    prefetch(access)                                # once per run; does nothing for a small run

Queries are prefetched one at a time, so that a query of the open page never waits for more than one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dashboard.data.run_access import LARGE_BYTES, RunAccess

__all__ = ["Query", "prefetch", "set_queries"]

Query = tuple[Callable[..., Any], tuple[Hashable, ...]]
"""A loader and its parameters."""

PATIENCE_S = 120.0
_prefetched: set[str] = set()
_queries: list[Query] = []


def set_queries(queries: Sequence[Query]) -> None:
    """Set the queries. They are passed in because the pages, which define them, import this package."""
    _queries[:] = queries


def prefetch(access: RunAccess) -> None:
    """Start prefetching if the run is large, once per run."""
    name = str(access.run.path)
    if name in _prefetched or access.size_bytes() < LARGE_BYTES:
        return
    _prefetched.add(name)
    threading.Thread(target=_ask_all, args=(access, tuple(_queries)), name="prefetch", daemon=True).start()


def _ask_all(access: RunAccess, queries: Sequence[Query]) -> None:
    for load, parameters in queries:
        access.ask(load, *parameters, first_s=PATIENCE_S)
