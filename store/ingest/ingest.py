"""Ingest tapes and events into the store, exactly once.

    with Ingester(run) as ingester:
        result = ingester.tick()          # everything written since the last tick
        result.rows["steps"]

One tick:

1. Poll the files (`tail`). If nothing is new, the database is not opened.
2. Open the database. If it was changed by another process since the last tick, load its read positions and poll again.
3. In one transaction append finished records, replace open ones, append events, and write the read positions.
4. Close it, so that readers can open it. Only then do the new positions take effect.

A kill at any time leaves either both the rows and their positions, or neither. If the store is deleted while an
ingester runs, the next tick rebuilds it from the tapes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from probes.tape.files.held_folder import HeldFolder
from probes.tape.redaction.secrets import Redactor
from probes.tape.rundir import RunDir
from probes.tape.segment_index import INDEX_NAME, retired_segments
from store.database import (
    Closing,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreForeignError,
    StoreOutdatedError,
    WriterLock,
    as_store_error,
    drop_useless_log,
    interruptible,
    log_of,
    quarantine,
)
from store.ingest.carry_over import carry_over
from store.ingest.event_times import dated
from store.ingest.name_codes import Dictionary, NameBook
from store.ingest.rank_folders import Folder, NodeFolders
from store.ingest.read_positions import ReadState, load, save
from store.ingest.retention import fold_calls, retirable
from store.ingest.store_file import check_origin, create, identity_of, known_store, load_read_only, remember
from store.ingest.tail import NewEvents, NewRecords, Problem, Tail, anchor_of
from store.ingest.transaction import Transfer
from store.writer_file import WriterFile

__all__ = ["Ingester", "TickResult"]

logger = logging.getLogger("rankscope.store")
MAX_REASON_CHARS = 300
MAX_WAIT_S = 8.0
"""Readers may keep the file open nearly all the time. If a tick could not open the store, the wait for the next tick is
doubled, up to this limit (seconds).
"""
TICK_BYTES = 256 << 20  # tape bytes per transaction: bounds memory, and the work lost by a kill


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    """Result of one tick."""

    rows: dict[str, int] = field(default_factory=dict)
    """Finished rows appended, by table."""
    lag: bool = False
    """True if more records are waiting: tick again at once."""
    busy: bool = False
    """True if a reader kept the store open for too long. Nothing is lost: the next tick continues."""
    skipped_lines: int = 0
    """Number of unreadable event lines so far."""
    truncated: tuple[str, ...] = ()
    """Tapes that are shorter than their headers state."""
    damaged: tuple[str, ...] = ()
    """Other files that could not be read completely."""
    quarantined: Path | None = None
    """New path of a store that was unusable."""
    bytes_read: int = 0
    duration_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Finished rows over all tables."""
        return sum(self.rows.values())


class Ingester(Closing):
    """The writer of one node's store. Raises StoreLockedError if the store already has one."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int = 0,
        *,
        role: str = "watch",
        threads: int = 1,
        wait_s: float = 1.0,
        store_path: Path | None = None,
        folders: Sequence[Folder] | None = None,
    ) -> None:
        """`store_path`: write outside the run's folder, without a writer lock. `folders`: the node's rank folders, if
        known (`folders_by_node`) and complete."""
        self.run = run
        self.path = store_path or run.store(node_rank)
        self._lock = None if store_path else WriterLock(self.path, role=role)
        self._held = None if store_path else HeldFolder(run.path)
        self._file = WriterFile(self.path, threads=threads)
        self._wait_s = wait_s
        self.folders = NodeFolders(run, node_rank, given=folders)
        self._tail = Tail(run, self.folders, syncs_events=role == "watch" and store_path is None)
        self._state = ReadState()
        self._identity: tuple[int, ...] | None = None  # identity of the file after our last write
        self._ticks = -1
        self._num_busy = 0  # number of consecutive ticks that found the file in use
        self._dictionary = Dictionary()
        self._name_books: dict[str, NameBook] = {}
        self._pending_problem = ""  # the reason for rebuilding the store, to be recorded in the new store

    def close(self) -> None:
        """Release the writer lock."""
        self._file.close()
        if self._lock:
            self._lock.close()
        if self._held:
            self._held.close()

    def mark_ingested(self, wall_ns: int) -> None:
        """Tell readers that the store holds all records up to this time (epoch nanoseconds)."""
        if self._lock:
            self._lock.mark_ingested(wall_ns)

    def tick(self, *, thorough: bool = False) -> TickResult:
        """Bring the store up to date. `thorough`: search the ranks' files to their ends. This is for runs in which the
        writers have exited.

        Raises StoreError if the store cannot be written (full disk, no permission); the next tick retries.
        """
        start = time.perf_counter()
        if self._held and (problem := self._held.problem()):
            raise StoreError(f"{problem}; its store is no longer written")
        self._ticks += 1
        quarantined = None
        try:
            if self._is_idle(thorough):
                return self._result(start)
            try:
                transfer = self._write(thorough)
            except StoreCorruptError as error:
                if not drop_useless_log(self.path, error):
                    quarantined = self.set_aside(error)
                transfer = self._write(thorough)
        except StoreBusyError:
            self._num_busy += 1
            return replace(self._result(start), busy=True, lag=True)
        self._num_busy = 0
        return replace(self._result(start, transfer), quarantined=quarantined)

    def set_aside(self, error: StoreCorruptError) -> Path | None:
        """Move a damaged or outdated store aside, and return its new path; the next tick rebuilds it from the tapes.

        The new store records damage and lost rows as a problem, for later reports.
        """
        quarantined = quarantine(self.path)
        logger.warning("%s (set aside: %s)", error, quarantined)
        lost = self._carry_over(quarantined, is_foreign=isinstance(error, StoreForeignError))
        # rebuilding an outdated store loses nothing, so it is not reported as a problem
        if lost or not isinstance(error, StoreOutdatedError):
            reason = str(error).removeprefix(f"{self.path} ").partition("; `rankscope")[0]
            reason = reason.replace(f"{self.path.parent}{os.sep}", "")[:MAX_REASON_CHARS]
            where = f"set aside as {quarantined.name}, " if quarantined and self._lock else ""
            self._pending_problem = f"{reason}; {where}rebuilt from the tapes{lost}"
        return quarantined

    def catch_up(self) -> dict[str, int]:
        """Tick until no records are left; return the number of appended rows by table. Raises StoreBusyError."""
        rows: Counter[str] = Counter()
        while True:
            result = self.tick(thorough=True)
            rows.update(result.rows)
            if result.busy:
                raise StoreBusyError(f"{self.path} is in use by another process")
            if not result.lag:
                return dict(rows)

    def retire(self, before_ns: int) -> dict[str, int]:
        """Replace calls before `before_ns` with totals. Returns the segments that may be deleted, {path: number of
        records}. Raises StoreError.
        """
        import duckdb

        try:
            with self._file.opened(wait_s=self._tick_wait_s) as connection:
                if known_store(connection, self.path) != (self._state.store_id, self._state.generation):
                    return {}  # another process has written the store; the next tick reads the new read positions
                fold_calls(connection, before_ns)
        except duckdb.Error as error:
            raise as_store_error(error, self.path) from error
        self._identity = identity_of(self.path)
        return dict(retirable(self.run, self.folders, self._state, before_ns))

    def _carry_over(self, former: Path | None, *, is_foreign: bool) -> str:
        """Copy the rows of retired tapes, which only the former store has. Returns a clause for the log if any were
        lost.
        """
        if is_foreign or not retired_segments(self.run.node_dir(self.folders.node_rank) / INDEX_NAME):
            return ""
        try:
            if former is not None:
                carry_over(former, self.path)
                return ""
        except StoreError as error:
            logger.warning("Rows of retired tapes are lost: %s", error)
        return ", without the rows of retired tapes, which cannot be read"

    @property
    def _tick_wait_s(self) -> float:
        """Seconds that the next tick may wait for the file."""
        return min(self._wait_s * 2.0 ** min(self._num_busy, 16), max(self._wait_s, MAX_WAIT_S))

    def _is_idle(self, thorough: bool) -> bool:
        """Return True if the store is unchanged and the files hold nothing new."""
        identity = identity_of(self.path)
        if identity is None:
            return False
        if identity != self._identity:
            state = load_read_only(self.path, self._tick_wait_s, self.folders.all())
            if state is None:
                return False
            self._state = state
            self._identity = identity
        return next(self._tail.changes(self._state, tick=self._ticks, thorough=thorough), None) is None

    def _write(self, thorough: bool) -> Transfer:
        import duckdb

        is_new = identity_of(self.path) is None and identity_of(log_of(self.path)) is None
        try:
            with self._file.opened(wait_s=self._tick_wait_s) as connection:
                known = None if is_new else known_store(connection, self.path)
                connection.execute("BEGIN")
                if known is None:
                    known = create(connection)
                if known != (self._state.store_id, self._state.generation):
                    check_origin(connection, self.path, self.folders.all())
                    self._state = load(connection)
                redact = Redactor.of(self.run.private_manifest())
                transfer = Transfer(connection, self._dictionary, self._state, redact)
                if self._pending_problem:
                    transfer.take_problem(self.path.name, self._pending_problem)
                with interruptible():
                    self._take_all(transfer, thorough)
                    changes = transfer.finish()
                    for path, book in self._name_books.items():
                        if book.problem:
                            transfer.take_problem(path, book.problem)
                    save(connection, changes)
                    connection.execute("COMMIT")
        except duckdb.Error as error:
            raise as_store_error(error, self.path) from error
        self._pending_problem = ""
        self._state = self._state.updated(changes)
        self._identity = identity_of(self.path)
        remember(self.path, self._state)
        return transfer

    def _take_all(self, transfer: Transfer, thorough: bool) -> None:
        for new in self._tail.changes(self._state, tick=self._ticks, thorough=thorough):
            if isinstance(new, Problem):
                transfer.take_problem(new.path, new.problem)
                if new.checked is not None:
                    transfer.changes.events[new.checked.path] = new.checked
            elif isinstance(new, NewEvents):
                transfer.take_events(self._dated(new, transfer))
            else:
                transfer.take_segment(new, anchor_ns=self._anchor(new, transfer), names=self._names(new))
            if transfer.bytes_read >= TICK_BYTES:
                transfer.is_partial = True
                break

    def _anchor(self, new: NewRecords, transfer: Transfer) -> int:
        """Offset from monotonic to epoch time (ns): one value for all segments of a rank.

        Each segment of a node process has a separate offset, because several processes write these segments, perhaps
        with a reboot in between.
        """
        if new.folder.is_node:
            return new.header.wall_minus_mono_ns
        known = self._rank_anchor(new.folder, transfer)
        return new.header.wall_minus_mono_ns if known is None else known

    def _rank_anchor(self, folder: Folder, transfer: Transfer) -> int | None:
        """The anchor of a rank's tapes, which is the same in all later ticks; None without a tape."""
        known = transfer.changes.anchors.get(folder.name, self._state.anchors.get(folder.name))
        if known is None:
            known = anchor_of(self.run, self.folders.segments(folder))
            if known is not None:
                transfer.changes.anchors[folder.name] = known
        return known

    def _dated(self, new: NewEvents, transfer: Transfer) -> NewEvents:
        """The events with their times by the monotonic clock."""
        name, anchors = new.folder.name, transfer.changes.anchors
        if new.folder.is_node:
            known = anchors.get(name, self._state.anchors.get(name))
        else:
            known = self._rank_anchor(new.folder, transfer)
        events, last = dated(new.events, known, is_node=new.folder.is_node)
        if last is not None and last != known:
            anchors[name] = last
        return replace(new, events=events)

    def _names(self, new: NewRecords) -> NameBook:
        name = f"{new.folder.name}/{new.header.table.names_file}"
        if name not in self._name_books:
            self._name_books[name] = NameBook(self.run.path / name, self._dictionary)
        return self._name_books[name]

    def _result(self, start: float, transfer: Transfer | None = None) -> TickResult:
        problems = self._state.problems
        truncated = tuple(path for path, text in problems.items() if "shorter than its header" in text)
        return TickResult(
            rows=dict(transfer.rows) if transfer else {},
            lag=transfer is not None and transfer.is_partial,
            skipped_lines=sum(position.skipped_lines for position in self._state.events.values()),
            truncated=truncated,
            damaged=tuple(path for path in problems if path not in truncated),
            bytes_read=transfer.bytes_read if transfer else 0,
            duration_s=time.perf_counter() - start,
        )
