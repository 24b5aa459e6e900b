"""Collect new records and events, and append them to the store in one transaction.

    transfer = Transfer(connection, dictionary, state, Redactor.of(run.private_manifest()))
    transfer.take_segment(records, anchor_ns=..., names=...)
    transfer.take_events(events)
    save(connection, transfer.finish())

Records of many segments are inserted together, one table at a time: an INSERT costs a millisecond, however many rows
it has.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from probes.tape.format.schema import TABLES
from probes.tape.redaction.secrets import Redactor
from store.ddl import SEGMENT, finished_table
from store.ingest.columns import Event, SegmentRecords, event_batch, insert, tape_batch
from store.ingest.name_codes import Dictionary, NameBook
from store.ingest.nccl_calls import NcclCalls
from store.ingest.read_positions import ReadState
from store.ingest.tail import NewEvents, NewRecords

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["Transfer"]

BATCH_ROWS = 200_000
_EVENT_TABLES = {table.event_kind: table for table in TABLES.values() if table.source == "event"}


class Transfer:
    """Rows of one transaction; `changes`: the read positions to save in the same transaction.

    Events are redacted here, so that no secret reaches the store or anything derived from it.
    """

    def __init__(
        self, connection: DuckDBPyConnection, dictionary: Dictionary, state: ReadState, redact: Redactor
    ) -> None:
        self.rows: Counter[str] = Counter()
        self.bytes_read = 0
        self.is_partial = False
        self.changes = ReadState(store_id=state.store_id, generation=state.generation + 1)
        self._connection = connection
        self._dictionary = dictionary
        self._state = state
        self._redact = redact
        self._complete: dict[str, list[SegmentRecords]] = {}
        self._open: dict[str, list[SegmentRecords]] = {}
        self._stale_open: dict[str, list[str]] = {}  # by table, the segments whose open rows will be replaced
        self._waiting: Counter[str] = Counter()
        self._events: dict[str, list[Event]] = {}
        self._nccl_calls = NcclCalls(connection)

    def take_problem(self, path: str, problem: str) -> None:
        """Record what is wrong with a file; an empty text clears it."""
        if problem != self._state.problems.get(path, ""):
            self.changes.problems[path] = problem

    def take_segment(self, added: NewRecords, *, anchor_ns: int, names: NameBook) -> None:
        """Add the new records of a segment."""
        table, path = added.header.table.name, added.position.path
        self.take_problem(path, added.problem)
        self.changes.segments[path] = added.position
        self.bytes_read += added.complete.nbytes
        before = self._state.segments.get(path)
        takes_open = added.header.table.can_be_open and not added.keeps_open
        if before is not None and before.pending and takes_open:
            self._stale_open.setdefault(table, []).append(path)
        still_open = added.open_records if takes_open else added.open_records[:0]
        for records, parts in ((added.complete, self._complete), (still_open, self._open)):
            if len(records):
                part = SegmentRecords(
                    rank=added.folder.rank,
                    attempt=added.header.attempt,
                    anchor_ns=anchor_ns,
                    names=names,
                    records=records,
                    segment=path,
                )
                parts.setdefault(table, []).append(part)
        self._waiting[table] += len(added.complete)
        if self._waiting[table] >= BATCH_ROWS:
            self._flush(table)

    def take_events(self, added: NewEvents) -> None:
        """Add new events to the table `events` and to the tables of their kinds."""
        before = self._state.events.get(added.position.path)
        self.take_problem(added.position.path, added.problem)
        self.changes.events[added.position.path] = added.position
        self.bytes_read += added.position.next_byte - (before.next_byte if before else 0)
        self.is_partial |= added.is_partial
        for content in added.events:
            event = Event(content=self._redact.within(content), attempt=added.folder.attempt, rank=added.folder.rank)
            self._events.setdefault("events", []).append(event)
            table = _EVENT_TABLES.get(content["kind"])
            if table is not None:
                self._events.setdefault(table.name, []).append(event)

    def finish(self) -> ReadState:
        """Append the collected rows and replace the open ones. Returns the read positions to save."""
        for table in list(self._complete):
            self._flush(table)
        for name, events in self._events.items():
            batch = event_batch(TABLES[name], events)
            insert(self._connection, batch, name)
            self.rows[name] += batch.num_rows
        for table, paths in self._stale_open.items():
            names = np.empty(len(paths), dtype=object)
            names[:] = paths
            self._connection.register("segments", {"path": names})
            self._connection.execute(f"DELETE FROM {table}_open WHERE {SEGMENT} IN (SELECT path FROM segments)")
            self._connection.unregister("segments")
        for name, parts in self._open.items():
            batch = tape_batch(TABLES[name], parts, self._dictionary, with_segment=True)
            insert(self._connection, batch, f"{name}_open")
        open_calls = [part.segment for part in self._open.get("nccl_calls", [])]
        if num_calls := self._nccl_calls.finish(self._stale_open.get("nccl_calls", []), open_calls):
            self.rows["collectives"] += num_calls
        return self.changes

    def _flush(self, name: str) -> None:
        parts = self._complete.pop(name, [])
        self._waiting[name] = 0
        if parts:
            table = TABLES[name]
            batch = tape_batch(table, parts, self._dictionary)
            insert(self._connection, batch, finished_table(table))
            if name == "nccl_calls":
                self._nccl_calls.take(batch)
            self.rows[name] += batch.num_rows
