"""Read each trace that a rank of this node has written, once, and enter what it shows as an event `profile_summary`.

reader = TraceReader(run, events)
reader.poll(store, ranks={0, 1})             # once a tick: returns at once, a thread reads one trace at a time
reader.finish(store, ranks={0, 1})           # at the end of the run: those that are left, within some seconds
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Set

from analyzers.run.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.profiling.trace_summary import summarise

__all__ = ["TraceReader"]

KINDS = (event_kinds.PROFILE_CAPTURED, event_kinds.PROFILE_SUMMARY)
FINISH_S = 40.0
"""A trace that is not read until then is listed as not read."""


class TraceReader:
    """The reader of one node. Its thread reads, the thread that polls looks for new traces."""

    def __init__(self, run: RunDir, events: EventWriter) -> None:
        self._run, self._events = run, events
        self._found: set[tuple[int, str]] = set()
        self._queue: deque[Event] = deque()
        self._thread: threading.Thread | None = None

    def poll(self, source: Source, ranks: Set[int]) -> None:
        """Look for new traces of these ranks, and begin to read them."""
        log = EventLog.load(source, KINDS)
        self._found |= {(event.attempt, event.text("path")) for event in log.of(event_kinds.PROFILE_SUMMARY)}
        for event in log.of(event_kinds.PROFILE_CAPTURED):
            key = (event.attempt, event.text("path"))
            if key[1] and key not in self._found and event.rank in ranks:
                self._found.add(key)
                self._queue.append(event)
        if self._queue and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._read_all, name="traces", daemon=True)
            self._thread.start()

    def finish(self, source: Source, ranks: Set[int]) -> bool:
        """Read what is left; returns True if anything may have been entered."""
        self.poll(source, ranks)
        if self._thread is None:
            return False
        self._thread.join(FINISH_S)
        return True

    def _read_all(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            path = event.text("path")
            parts = path.split("/")
            is_ours = parts[0] == "traces" and ".." not in parts  # an event may be damaged
            about = summarise(self._run.path / path) if is_ours else {"problem": "is no trace of this run"}
            self._events.write(
                event_kinds.PROFILE_SUMMARY,
                attempt=event.attempt,
                capture_rank=event.rank,
                path=path,
                first_step=event.integer("first_step"),
                last_step=event.integer("last_step"),
                request=event.detail.get("request"),
                reason=event.text("reason"),
                **about,
            )
