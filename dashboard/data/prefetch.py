"""Prefetch the first queries of the other pages of a large run.

    use(((overview.load_lines, ()), ...))   # once: the loaders, in the order in which they are computed
    prefetch(access)                        # once for each run; does nothing for a run whose pages are quick anyway

One query at a time, so that those of the open page never wait for more than one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dashboard.data.run_access import LARGE_BYTES, RunAccess

__all__ = ["Question", "prefetch", "use"]

Question = tuple[Callable[..., Any], tuple[Hashable, ...]]
"""A loader and its parameters."""

PATIENCE_S = 120.0
_prefetched: set[str] = set()
_questions: list[Question] = []


def use(questions: Sequence[Question]) -> None:
    """Set what is prefetched. The pages import this package, so they are not imported here."""
    _questions[:] = questions


def prefetch(access: RunAccess) -> None:
    """Start to compute, if the run is large and this has not been done."""
    name = str(access.run.path)
    if name in _prefetched or access.size_bytes() < LARGE_BYTES:
        return
    _prefetched.add(name)
    threading.Thread(target=_ask_all, args=(access, tuple(_questions)), name="prefetch", daemon=True).start()


def _ask_all(access: RunAccess, questions: Sequence[Question]) -> None:
    for load, parameters in questions:
        access.ask(load, *parameters, first_s=PATIENCE_S)
