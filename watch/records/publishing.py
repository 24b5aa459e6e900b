"""Publish a node's records during the run: rows of its store as Parquet at a configured address.

    publishing = Publishing.of(run, events, node_rank=0)     # None if no address is configured
    publishing.note(result.rows, until_ns=began_ns)          # after each tick, in the thread that ingests
    publishing.poll()
    publishing.finish()                                      # the last rows, when the store is closed

A separate thread writes to the address at a lower priority, but not the lowest, because the watch waits while that
thread holds the GIL. Only one round is in memory; if it cannot be written, new rows wait in the store. Events are
written only for changes: `publish_failed`, with the reason, when rounds begin to fail, and `published` for the first
success and whenever rounds succeed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from probes.settings.section import read
from probes.settings.sections import PublishSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.redaction.secrets import Redactor
from probes.tape.rundir import RunDir
from store import StoreError
from store.published.address import AddressError, one_line
from store.published.publish import Publisher, Round
from watch.background_loop import new_thread

__all__ = ["Publishing"]

logger = logging.getLogger("rankscope.watch")
FINISH_S = 20.0
RETRY_S = 1.0
MAX_RETRY_S = 60.0
HOLDS_S = 600.0
"""Maximum seconds for which unpublished rows prevent the store from folding old calls into totals; after that, all rows
are published again.
"""
NICENESS = 10


class Publishing:
    """Called by the thread that ingests; only `_write_out` runs in another thread."""

    def __init__(self, publisher: Publisher, events: EventWriter, *, every_s: float) -> None:
        self._publisher, self._events, self._every_s = publisher, events, every_s
        self._thread: threading.Thread | None = None
        self._round: Round | None = None
        self._due_s = self._retry_at_s = 0.0
        self._num_failures = 0
        self._reported_kind = self._reason = ""
        self._over = threading.Event()
        self._drained_s = time.monotonic()

    @classmethod
    def of(cls, run: RunDir, events: EventWriter, *, node_rank: int) -> Publishing | None:
        """Create it from the run's configuration; None if nothing is published."""
        settings = read(PublishSettings, run.private_manifest())
        address = settings.address
        if not address:
            return None
        try:
            publisher = Publisher(address, run, node_rank=node_rank)
        except AddressError as error:
            # The address may have been refused because it contains keys, so it is redacted.
            detail = Redactor().within({"address": address, "reason": str(error)})
            events.write(event_kinds.PUBLISH_FAILED, **detail)
            return None
        return cls(publisher, events, every_s=settings.every_s)

    def note(self, rows: Mapping[str, int], *, until_ns: int | None) -> None:
        """Count rows that a tick has appended. The store is then complete up to `until_ns` (epoch nanoseconds; None:
        more records are waiting).
        """
        self._publisher.note(rows, until_ns=until_ns)

    def poll(self) -> None:
        """Start the next round if it is due and none is being written. Raises StoreError."""
        if self._is_writing or time.monotonic() < max(self._due_s, self._retry_at_s):
            return
        self._due_s = time.monotonic() + self._every_s
        self._next(is_last=False)

    def finish(self, limit_s: float = FINISH_S) -> None:
        """Publish the last rows within `limit_s`. If the time was too short, an event reports this."""
        deadline = time.monotonic() + limit_s
        while not self._over.is_set():
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._over.is_set():
                break
            if time.monotonic() >= deadline:
                self._reported_kind = ""
                self._report(
                    event_kinds.PUBLISH_FAILED, reason=f"the last rows were not published: {self._reason or 'slow'}"
                )
                break
            if self._round is not None:  # the previous try failed, so pause before the next one
                time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
            try:
                self._next(is_last=True)
            except StoreError as error:
                self._reason = str(error)
                time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))

    def allows_folding(self) -> bool:
        """Return True if old calls may be folded into totals: all rows are published, or have waited for `HOLDS_S`."""
        now_s = time.monotonic()
        if self._publisher.is_drained:
            self._drained_s = now_s
        elif now_s - self._drained_s < HOLDS_S:
            return False
        else:
            self._publisher.restart()
        return True

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _next(self, *, is_last: bool) -> None:
        """Write the failed round, or a new one, in a thread."""
        if self._round is None:
            self._round = self._publisher.read(is_last=is_last)
        self._thread = new_thread(partial(self._write_out, self._round), name="publish")
        self._thread.start()

    def _write_out(self, rows: Round) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._publisher.write(rows)
        except Exception as error:  # the watch must survive any failure of the network or a library
            self._reason = reason = one_line(error) or type(error).__name__
            logger.warning("%s: not published, will be retried: %s", self._publisher.address, reason)
            self._num_failures += 1
            self._retry_at_s = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2**self._num_failures)
            self._report(event_kinds.PUBLISH_FAILED, reason=reason)
            return
        self._num_failures, self._reason, self._round = 0, "", None
        if rows.is_partial:
            self._due_s = 0.0
        self._report(event_kinds.PUBLISHED)
        if rows.is_last:
            self._over.set()

    def _report(self, kind: str, **detail: Any) -> None:
        """Write an event unless the last one was of the same kind."""
        if kind != self._reported_kind:
            self._reported_kind = kind
            self._events.write(kind, address=self._publisher.address, **detail)
