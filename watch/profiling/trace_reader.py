"""Read each new trace of this node's ranks once, and record its summary as an event `profile_summary`.

reader = TraceReader(run, events)
reader.poll(store, ranks={0, 1})             # once a tick: returns immediately, a thread reads one trace at a time
reader.finish(store, ranks={0, 1})           # at the end of the run: the remaining traces, within some seconds
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store.readers.traces.kineto import read_trace
from store.readers.traces.rank_traces import breakdown
from store.readers.traces.trace_operators import OperatorTimes
from store.readers.untrusted.external_files import SourceError

__all__ = ["TraceReader", "summarise"]

MAX_BYTES = 48 << 20
"""Maximum bytes of a compressed trace. A larger one takes minutes, and is left to `rankscope analyze`."""
NUM_OPERATORS = 60

KINDS = (event_kinds.PROFILE_CAPTURED, event_kinds.PROFILE_SUMMARY)
FINISH_S = 40.0
"""Seconds for reading the remaining traces at the end of the run; traces not read by then are listed."""


class TraceReader:
    """Trace reader of one node. The thread that polls looks for new traces, and another thread reads them."""

    def __init__(self, run: RunDir, events: EventWriter) -> None:
        self._run, self._events = run, events
        self._found: set[tuple[int, str]] = set()
        self._queue: deque[Event] = deque()
        self._thread: threading.Thread | None = None

    def poll(self, source: Source, ranks: Set[int]) -> None:
        """Look for new traces of these ranks, and start reading them."""
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
        """Read the remaining traces. Returns True if an event may have been written."""
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
            is_ours = parts[0] == "traces" and ".." not in parts  # the event may be damaged
            summary = summarise(self._run.path / path) if is_ours else {"problem": "is not a trace of this run"}
            self._events.write(
                event_kinds.PROFILE_SUMMARY,
                attempt=event.attempt,
                capture_rank=event.rank,
                path=path,
                first_step=event.integer("first_step"),
                last_step=event.integer("last_step"),
                request=event.detail.get("request"),
                reason=event.text("reason"),
                **summary,
            )


def summarise(path: Path) -> dict[str, Any]:
    """Fields of a `profile_summary` event; `problem` if the trace was not read completely."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_BYTES:
            return {"problem": f"has {num_bytes / 1e6:.0f} MB: read it with rankscope analyze"}
        operators = OperatorTimes()
        trace = read_trace(path, each=operators.take)
    except FileNotFoundError:
        return {"problem": "was removed before it was read"}
    except (OSError, SourceError) as error:
        return {"problem": str(error)[:300]}
    parts = {part: round(float(np.mean(values)), 4) for part, values in breakdown(trace).items()}
    rows = [asdict(row) for row in operators.rows(num_steps=len(trace.steps))[:NUM_OPERATORS]]
    for row in rows:
        row["self_ms"], row["calls"] = round(row["self_ms"], 4), round(row["calls"], 2)
    return {"parts_ms": parts, "operators": rows, "problem": trace.problem or None}
