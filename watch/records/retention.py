"""Limit the records of a run to a time window, and to a budget in bytes per rank and hour.

    retention = Retention.of(run, ingester, syncing, events)     # None if everything is kept
    retention.poll()                                             # in the thread that ingests; acts once a minute

1. Compare the size of the node's tapes and store with the budget for the hours recorded so far (at least one hour).
   Above it, halve the window, down to a minute; well below it, let the window grow back.
2. The window ends with the newest record. Window and hours are based on the records' times, which come from one clock
   within an attempt, so setting the wall clock retires nothing, and time between attempts does not count.
3. Replace calls before the window with totals in the store. Mark ingested segments before it as retired, and remove
   them (`store.ingest.retention`).

If even a minute exceeds the budget, this is reported once (`budget_exceeded`). Steps and spans are never removed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from probes.settings.section import read
from probes.settings.sections import ProbesSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Ingester, Store
from store.database import log_of
from watch.records.tape_sync import TapeSync

__all__ = ["Retention", "RetentionPolicy"]

MIN_WINDOW_S = 60.0
GROW_BELOW = 0.7
"""Share of the budget below which the window grows again."""
_RECORDED = """
SELECT max(last_ns - first_ns), max(last_ns) FROM (
    SELECT attempt, rank, min(at_ns) AS first_ns, max(at_ns) AS last_ns FROM (
        SELECT attempt, rank, start_ns AS at_ns FROM steps
        UNION ALL SELECT attempt, rank, issue_ns FROM collectives)
    GROUP BY attempt, rank HAVING last_ns IS NOT NULL)
GROUP BY attempt ORDER BY attempt
"""
"""Duration and end of the records of each attempt. Clock anchors may differ between ranks and attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Time window and budget of the records that are kept."""

    window_s: float = ProbesSettings().retain_s
    budget_bytes: float = 0.0
    """Per rank and hour; 0: no budget."""
    every_s: float = 60.0


class Retention:
    """The retention of one node's records."""

    def __init__(
        self, run: RunDir, ingester: Ingester, syncing: TapeSync, events: EventWriter, policy: RetentionPolicy
    ) -> None:
        self.window_s = policy.window_s
        self._run, self._ingester, self._syncing, self._events, self._policy = run, ingester, syncing, events, policy
        self._polled_s = time.monotonic()
        self._num_segments = 0
        self._reported_s = 0.0  # the window (seconds) that the last event reported
        self._is_exceeded = False

    @classmethod
    def of(cls, run: RunDir, ingester: Ingester, syncing: TapeSync, events: EventWriter) -> Retention | None:
        """Create it from the run's configuration; None if everything is kept."""
        settings = read(ProbesSettings, run.manifest())
        if settings.retain != "window":
            return None
        policy = RetentionPolicy(window_s=max(MIN_WINDOW_S, settings.retain_s), budget_bytes=settings.budget_mb * 1e6)
        return cls(run, ingester, syncing, events, policy)

    def poll(self) -> None:
        """Retire what is due, once a minute. Raises StoreError, OSError."""
        if time.monotonic() - self._polled_s < self._policy.every_s:
            return
        self._polled_s = time.monotonic()
        self.retire()

    def retire(self) -> None:
        """Retire what is due now. Raises StoreError, OSError."""
        with Store.open(self._run, catch_up=False, node=self._ingester.folders.node_rank, threads=1) as store:
            recorded = store.rows(_RECORDED)
        if not recorded:
            return
        used_bytes, num_ranks = self._used()
        hours = max(1.0, sum(span_ns for span_ns, _ in recorded) / 3.6e12)
        budget_bytes = self._policy.budget_bytes * max(1, num_ranks) * hours
        if budget_bytes:
            self._adapt(used_bytes, budget_bytes)
        _, newest_ns = recorded[-1]
        segments = self._ingester.retire(newest_ns - int(self.window_s * 1e9))
        self._syncing.retire(segments)
        self._num_segments += len(segments)
        if segments and self._reported_s != self.window_s:
            self._reported_s = self.window_s
            self._events.write(
                event_kinds.RECORDS_RETIRED, window_s=self.window_s, segments=self._num_segments,
                used_bytes=used_bytes, budget_bytes=int(budget_bytes) or None,
            )  # fmt: skip

    def _adapt(self, used_bytes: int, budget_bytes: float) -> None:
        if used_bytes > budget_bytes:
            if self.window_s <= MIN_WINDOW_S and not self._is_exceeded:
                self._is_exceeded = True
                self._events.write(event_kinds.BUDGET_EXCEEDED, used_bytes=used_bytes, budget_bytes=int(budget_bytes))
            self.window_s = max(MIN_WINDOW_S, self.window_s / 2)
        elif used_bytes < GROW_BELOW * budget_bytes:
            self.window_s = min(self._policy.window_s, self.window_s * 2)

    def _used(self) -> tuple[int, int]:
        """Bytes of the node's tapes and store on disk, and the number of ranks on the node."""
        store = self._ingester.path
        used, ranks = sum(_sizes([store, log_of(store)])), set()
        for folder in self._ingester.folders.all():
            used += sum(_sizes(folder.path.iterdir()))
            ranks |= set() if folder.is_node else {folder.rank}
        return used, len(ranks)


def _sizes(paths: Iterator[Path] | list[Path]) -> Iterator[int]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.lstat().st_blocks * 512
