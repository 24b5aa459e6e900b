"""Run the analyses of plug-ins on a live run, in a thread that nothing else waits for.

    loop = PluginLoop(ingest.open_store, tapes, judge)
    with loop.running():
        ...
    loop.finish()                       # a last round over the final records, at most a few seconds

At the end of the block the current call is aborted and the plug-in's process killed, because stopping must not wait for
a plug-in that hangs. The store is open only during queries, never while a plug-in computes, so a hanging plug-in does
not delay ingestion. If no plug-in analyzes live runs, the thread ends immediately.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from analyzers.analysis import plugin_analyses
from analyzers.plugins import CHILD, GROUP
from store import Store, StoreError
from store.plugins import plugins
from watch.background_loop import background_loop, new_thread
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes

__all__ = ["PluginLoop", "QueriedStore"]

logger = logging.getLogger("rankscope.watch")
TICK_S = 1.0
FINISH_S = 5.0
"""Seconds for the last round of all plug-ins together; `analyze` runs them again anyway."""
JOIN_S = 2.0
REST_RATIO = 10.0
"""Pause after a round, as a multiple of its duration, since the ranks need the cores."""


class QueriedStore:
    """A `Source` over a run's store, which is reopened for each query. `interrupt` ends a running query."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store
        self._running: Store | None = None

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        """See `Store.query`."""
        with self._open_store() as store:
            self._running = store
            return store.query(sql, params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """See `Store.rows`."""
        with self._open_store() as store:
            self._running = store
            return store.rows(sql, params)

    def has(self, table: str) -> bool:
        """See `Store.has`."""
        with self._open_store() as store:
            return store.has(table)

    def interrupt(self) -> None:
        """Interrupt the running query, if any."""
        if self._running is not None:
            self._running.interrupt()


class PluginLoop:
    """Runs the live analyses of plug-ins; `tick` runs one round."""

    def __init__(self, open_store: Callable[[], Store], tapes: LiveTapes, judge: LiveJudge) -> None:
        self._tapes, self._judge = tapes, judge
        self._source = QueriedStore(open_store)
        self._last_s = time.monotonic()
        self._is_needed = False
        self._is_leaving = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run rounds in a thread while the block runs."""
        with background_loop(self._run_until, name="plug-ins"):
            try:
                yield
            finally:
                self._interrupt(refuse=True)

    def tick(self) -> None:
        """Run one round. Raises StoreError if the store cannot be read at the moment."""
        now_s = time.monotonic()
        passed, self._last_s = max(1, round(now_s - self._last_s)), now_s
        findings = self._judge.plugin_findings(self._source, self._tapes.recorded_now_ns(), num_ticks=passed)
        if not self._is_leaving:  # a plug-in whose call was aborted because the run ended has not failed
            self._judge.report_failures()
        self._judge.report(findings)

    def finish(self) -> None:
        """Run the last round, after the last records were ingested; skipped if the run is being stopped."""
        if not self._is_needed or self._judge.is_stopping:
            return
        self._interrupt(refuse=False)
        last = new_thread(self._try, name="plug-ins")
        last.start()
        last.join(FINISH_S)
        self._interrupt(refuse=True)
        last.join(JOIN_S)

    def _interrupt(self, *, refuse: bool) -> None:
        self._is_leaving = refuse
        for plugin in plugins(GROUP, CHILD):
            plugin.interrupt(refuse=refuse)

    def _run_until(self, stop: threading.Event) -> None:
        needed = any(analysis.live != "never" for analysis in plugin_analyses())
        self._is_needed = needed and not stop.is_set()
        while self._is_needed and not stop.is_set():
            start = time.monotonic()
            self._try()
            stop.wait(max(TICK_S, REST_RATIO * min(1.0, time.monotonic() - start)))

    def _try(self) -> None:
        try:
            self.tick()
        except StoreError as error:  # a writer has the file open, or there is no store yet
            logger.info("%s", error)
        except BaseException:  # a failed round (even SystemExit) must not end the thread
            logger.exception("Plug-ins could not be run, trying again.")
