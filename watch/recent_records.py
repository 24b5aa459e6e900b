"""The newest records of a run's newest attempts, held in memory to judge hangs and deaths independently of the store.

    with RecentRecords(run, NewestFolders(run, 0, with_health=True), anchor_ns=wall_minus_mono_ns) as recent:
        source = recent.read()          # a Store with the current content of the tapes; later calls add new records
        recent.num_rows

All times derive from the monotonic clock: records and events of this node share one anchor, so setting the wall clock
during the run does not shift them. Records of other nodes keep their anchors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probes.tape import event_kinds
from probes.tape.redaction.secrets import Redactor
from probes.tape.rundir import RunDir
from store.database import Closing, connect_memory, interruptible
from store.ingest.name_codes import Dictionary, NameBook
from store.ingest.newest_folders import NewestFolders
from store.ingest.read_positions import ReadState
from store.ingest.store_file import create
from store.ingest.tail import NewEvents, NewRecords, Problem, Tail
from store.ingest.transaction import Transfer
from store.reader import Store

__all__ = ["RecentRecords"]

_LASTING = frozenset({
    event_kinds.RUN_STARTED, event_kinds.RUN_ENDED, event_kinds.STOP_REQUESTED, event_kinds.EXCLUDED,
    event_kinds.LAUNCHER_LOST, event_kinds.WATCH_STARTED, event_kinds.WATCH_STOPPED, event_kinds.NODE_SILENT,
    event_kinds.NODE_HEARD,
})  # fmt: skip
"""Events that also concern later attempts."""


class RecentRecords(Closing):
    """A store in memory. `anchor_ns`: wall minus monotonic clock of this node's records; None: as they were written."""

    def __init__(self, run: RunDir, folders: NewestFolders, *, anchor_ns: int | None) -> None:
        self.num_rows = 0
        self._run, self._folders, self._anchor_ns = run, folders, anchor_ns
        self._connection = connect_memory(threads=1)
        create(self._connection)
        self.store = Store(self._connection, f"the newest records of {run.path}")
        """Result of the last `read`."""
        self._tail = Tail(run, folders)
        self._state = ReadState()
        self._ticks = 0
        self._dictionary = Dictionary()
        self._books: dict[str, NameBook] = {}

    def read(self) -> Store:
        """Read new records, and return the store, which the caller must not close. After an error, create a new object:
        another call could read some rows twice.
        """
        self._ticks += 1
        redact = Redactor.of(self._run.private_manifest())
        transfer = Transfer(self._connection, self._dictionary, self._state, redact)
        with interruptible():
            for new in self._tail.changes(self._state, tick=self._ticks, thorough=False):
                if isinstance(new, Problem):
                    continue  # not reported here: the process that writes the store reports the problem
                if isinstance(new, NewEvents):
                    transfer.take_events(self._by_this_clock(self._current(new)))
                else:
                    transfer.take_segment(new, anchor_ns=self._anchor(new), names=self._book(new))
            changes = transfer.finish()
        self._state = self._state.updated(changes)
        self.num_rows += sum(transfer.rows.values())
        return self.store

    def close(self) -> None:
        """Free the memory."""
        self._connection.close()

    def _anchor(self, new: NewRecords) -> int:
        if self._anchor_ns is not None and self._folders.is_own(new.folder):
            return self._anchor_ns
        return new.header.wall_minus_mono_ns

    def _current(self, new: NewEvents) -> NewEvents:
        """Leave out events that concern only earlier attempts, since their number grows with the run."""
        oldest = self._folders.oldest

        def is_past(event: dict[str, Any]) -> bool:
            attempt = event.get("attempt")
            return isinstance(attempt, int) and attempt < oldest and event["kind"] not in _LASTING

        return replace(new, events=[event for event in new.events if not is_past(event)])

    def _by_this_clock(self, new: NewEvents) -> NewEvents:
        """Events, with the times of this node's attempts derived from their monotonic clock."""
        if self._anchor_ns is None or not self._folders.is_own(new.folder):
            return new
        oldest = self._folders.oldest
        return replace(new, events=[self._moved(event, oldest) for event in new.events])

    def _moved(self, event: dict[str, Any], oldest: int) -> dict[str, Any]:
        mono_ns, attempt = event.get("mono_ns"), event.get("attempt")
        if not isinstance(mono_ns, int) or not isinstance(attempt, int) or attempt < oldest:
            return event  # unchanged: the monotonic clock of an earlier attempt may belong to an earlier boot
        return event | {"wall_ns": mono_ns + (self._anchor_ns or 0)}

    def _book(self, new: NewRecords) -> NameBook:
        name = f"{new.folder.name}/{new.header.table.names_file}"
        if name not in self._books:
            self._books[name] = NameBook(self._run.path / name, self._dictionary)
        return self._books[name]
