"""Judge with plug-ins while the run lives, in a thread that nothing waits for.

    loop = PluginLoop(ingest.open_store, tapes, judge)
    with loop.running():
        ...
    loop.finish()                       # once more, over the last records

The store is open for the time of one query, never while a plug-in computes: one that hangs delays no ingest. The thread
ends at once where no plug-in judges live runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt

from analyzers.analysis import plugin_analyses
from store import Store, StoreError
from watch.background_loop import background_loop
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes

__all__ = ["PluginLoop", "QueriedStore"]

logger = logging.getLogger("rankscope.watch")
TICK_S = 1.0
REST_RATIO = 10.0
"""Rest after a round, as a multiple of what it took: the ranks need the cores."""


class QueriedStore:
    """A `Source` over a run's store that opens it anew for each query. `interrupt` ends the one that runs."""

    def __init__(self, opened: Callable[[], Store]) -> None:
        self._opened = opened
        self._running: Store | None = None

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        """As `Store.query`."""
        with self._opened() as store:
            self._running = store
            return store.query(sql, params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """As `Store.rows`."""
        with self._opened() as store:
            self._running = store
            return store.rows(sql, params)

    def has(self, table: str) -> bool:
        """As `Store.has`."""
        with self._opened() as store:
            return store.has(table)

    def interrupt(self) -> None:
        """End the query that runs, if one does."""
        if self._running is not None:
            self._running.interrupt()


class PluginLoop:
    """`tick` does one round."""

    def __init__(self, opened: Callable[[], Store], tapes: LiveTapes, judge: LiveJudge) -> None:
        self._tapes, self._judge = tapes, judge
        self._source = QueriedStore(opened)
        self._last_s = time.monotonic()
        self._is_needed = False

    def running(self) -> AbstractContextManager[None]:
        """Judge in a thread while the block runs."""
        return background_loop(self._run_until, name="plug-ins")

    def tick(self) -> None:
        """One round. Raises StoreError if the store cannot be read at the moment."""
        now_s = time.monotonic()
        passed, self._last_s = max(1, round(now_s - self._last_s)), now_s
        findings = self._judge.plugin_findings(self._source, self._tapes.recorded_now_ns(), num_ticks=passed)
        self._judge.report_failures()
        self._judge.report(findings)

    def finish(self) -> None:
        """The last round, after the last records were ingested."""
        if self._is_needed:
            self._try()

    def _run_until(self, stop: threading.Event) -> None:
        self._is_needed = any(analysis.live != "never" for analysis in plugin_analyses())
        while self._is_needed and not stop.is_set():
            start = time.monotonic()
            self._try()
            stop.wait(max(TICK_S, REST_RATIO * min(1.0, time.monotonic() - start)))

    def _try(self) -> None:
        try:
            self.tick()
        except StoreError as error:  # a writer holds the file, or there is no store yet
            logger.info("%s", error)
        except BaseException:  # a round that fails, by SystemExit too, must not end the thread
            logger.exception("Plug-ins were not asked, trying again.")
