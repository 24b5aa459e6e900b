"""Cache of query results for the pages, computed in background threads.

    answers = Answers()
    answer = answers.get(("runs/demo", "loss"), version, lambda: load_loss(store), patience_s=2.0)
    answer.value, answer.is_fresh, answer.error
    answer.pending                      # future of the running computation, or None

Every open page polls its queries every two seconds. Each query is computed once for all pages, in a thread, and again
only when the store has changed. A page waits once, for `patience_s`; a slower result is returned by a later poll, and
until then the previous one is shown (`is_fresh` False). After a slow query there is a pause of ten times its duration,
so that watching a huge run costs at most a tenth of a core and rarely delays its writer. The pause never exceeds the
time for which the query has been polled, because results of a run's first seconds are soon out of date.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Answers"]

MAX_ENTRIES = 256
REST_FACTOR, OFTEN_REST_FACTOR = 10.0, 1.0
"""Pause after a query, as a multiple of its duration; `OFTEN_REST_FACTOR` is for queries of the current state."""
AFTER_ERROR_S = 1.0
QUICK_S = 0.25
"""Queries that take less time than this (seconds) are repeated whenever the store has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`value` is None until the first result; `error` is what the last computation raised; `pending` is the running
    computation.
    """

    value: Any = None
    is_fresh: bool = False
    took_s: float = 0.0
    error: Exception | None = None
    pending: Future[None] | None = None


@dataclass(slots=True)
class _Entry:
    version: Hashable = None
    value: Any = None
    error: Exception | None = None
    has_value: bool = False
    took_s: float = 0.0
    first_at: float = 0.0
    done_at: float = 0.0
    running: Future[None] | None = None


class Answers:
    """Keeps the `max_entries` most recently used answers."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, threads: int = 3) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="answers")

    def get(
        self,
        key: Hashable,
        version: Hashable,
        compute: Callable[[], Any],
        *,
        patience_s: float,
        again_s: float = 0.1,
        rest_factor: float = REST_FACTOR,
    ) -> Answer:
        """Return the newest answer. Waits up to `patience_s` after the first request, and `again_s` for a newer
        answer.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            settled = entry.version == version and entry.has_value and entry.error is None
            if not settled and entry.running is None and self._is_due(entry, rest_factor):
                entry.first_at = entry.first_at or time.monotonic()
                entry.running = self._pool.submit(self._compute, entry, version, compute)
            running = None if settled else entry.running
            first_s = max(0.0, entry.first_at + patience_s - time.monotonic())
        if running is not None:
            try:
                running.result(again_s if entry.has_value or entry.error else first_s)
            except TimeoutError:
                pass
        with self._lock:
            fresh = entry.version == version and entry.error is None and entry.has_value
            return Answer(
                value=entry.value, is_fresh=fresh, took_s=entry.took_s, error=entry.error, pending=entry.running
            )  # fmt: skip

    def close(self) -> None:
        """Cancel computations that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_due(self, entry: _Entry, rest_factor: float) -> bool:
        if not entry.has_value and entry.error is None:
            return True
        rest_s = min(rest_factor * entry.took_s, entry.done_at - entry.first_at) if entry.took_s > QUICK_S else 0.0
        if entry.error is not None:  # usually another process briefly had the store open
            rest_s = AFTER_ERROR_S
        return time.monotonic() - entry.done_at >= rest_s

    def _compute(self, entry: _Entry, version: Hashable, compute: Callable[[], Any]) -> None:
        began = time.monotonic()
        value, error = None, None
        try:
            value = compute()
        except Exception as problem:  # the page shows the error, and the other queries continue
            error = problem
        with self._lock:
            if error is None:
                entry.value, entry.has_value = value, True
            entry.version, entry.error = version, error
            entry.done_at = time.monotonic()
            entry.took_s = entry.done_at - began
            entry.running = None
