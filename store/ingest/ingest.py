"""Tapes and events into the store, exactly once.

    with Ingester(run) as ingester:
        result = ingester.tick()          # what came since the last tick
        result.rows["steps"]

One tick:

1. Poll the files (`tail`). If nothing is new, that is all: the database is not opened.
2. Open the database; if it is another one than last time, take the read positions from it and poll again.
3. In one transaction append finished records, replace the open ones, append events, and write the read positions.
4. Close it, so that readers have their turn. Only now the new positions count.

A kill at any moment leaves the rows and their positions, or neither. The store can be deleted beneath a living
ingester: the next tick makes it again from the tapes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from probes.tape.files.held_folder import HeldFolder
from probes.tape.redaction.secrets import Redactor
from probes.tape.rundir import RunDir
from probes.tape.segment_index import INDEX_NAME, retired_segments
from store.database import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreOutdatedError,
    WriterLock,
    connect_writer,
    drop_useless_log,
    interruptible,
    log_of,
    quarantine,
    translated,
)
from store.ingest.carry_over import carry_over
from store.ingest.name_codes import Dictionary, NameBook
from store.ingest.rank_folders import Folder, NodeFolders
from store.ingest.read_positions import ReadState, load, save
from store.ingest.retention import fold_calls, retirable
from store.ingest.store_file import create, identity_of, known_store, load_read_only
from store.ingest.tail import NewEvents, NewRecords, Problem, Tail, anchor_of
from store.ingest.transaction import Transfer

__all__ = ["Ingester", "TickResult"]

logger = logging.getLogger("rankscope.store")
MAX_REASON = 300
MAX_WAIT_S = 8.0
"""With readers that take turns the file is nearly always in use: after a tick that found it so, the next waits
twice as long for a gap, up to this."""
TICK_BYTES = 256 << 20  # of tapes in one transaction: bounds memory, and what a kill makes us do again


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    """Counts of one tick."""

    rows: dict[str, int] = field(default_factory=dict)
    """Finished rows appended, by table."""
    lag: bool = False
    """More is there already; tick again."""
    busy: bool = False
    """A reader had the store open for too long; nothing was lost, the next tick takes it up."""
    skipped_lines: int = 0
    """Lines of events that could not be read, so far."""
    truncated: tuple[str, ...] = ()
    """Tapes that are shorter than their headers say."""
    damaged: tuple[str, ...] = ()
    """Files that could not be read, or not wholly."""
    quarantined: Path | None = None
    """Path to which an unusable store was moved."""
    bytes_read: int = 0
    duration_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Finished rows over all tables."""
        return sum(self.rows.values())


class Ingester:
    """The writer of one node's store. Raises StoreLockedError if another process is it already."""

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
        """`store_path` writes elsewhere than to the run's folder; then no writer's lock is taken.

        `folders` are the node's, if they are known (`folders_by_node`) and no more will come.
        """
        self.run = run
        self.path = store_path or run.store(node_rank)
        self._lock = None if store_path else WriterLock(self.path, role=role)
        self._held = None if store_path else HeldFolder(run.path)
        self._threads = threads
        self._wait_s = wait_s
        self.folders = NodeFolders(run, node_rank, given=folders)
        self._tail = Tail(run, self.folders, syncs_events=role == "watch" and store_path is None)
        self._state = ReadState()
        self._identity: tuple[int, ...] | None = None  # of the file as we left it
        self._ticks = -1
        self._num_busy = 0  # ticks in a row that found the file in use
        self._dictionary = Dictionary()
        self._books: dict[str, NameBook] = {}
        self._set_aside = ""  # what is not yet in the store of how it came to be made again

    def close(self) -> None:
        """Give up the right to write."""
        if self._lock:
            self._lock.close()
        if self._held:
            self._held.close()

    def mark_ingested(self, wall_ns: int) -> None:
        """Note for readers that the store has all that was recorded until then (epoch nanoseconds)."""
        if self._lock:
            self._lock.mark_ingested(wall_ns)

    def __enter__(self) -> Ingester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tick(self, *, thorough: bool = False) -> TickResult:
        """Bring the store up to date. `thorough` searches tapes to their ends: for runs whose writers are gone.

        Raises StoreError if the store cannot be written (a full disk, no permission); the next tick tries again.
        """
        start = time.perf_counter()
        if self._held and (problem := self._held.problem()):
            raise StoreError(f"{problem}; its store is not written any more")
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
        """Set a damaged store aside; the next tick makes it again from the tapes. Returns where it is now.

        The new store lists it as a problem: a report that is made later says it too.
        """
        quarantined = quarantine(self.path)
        logger.warning("%s (set aside: %s)", error, quarantined)
        lost = self._carry_over(quarantined)
        if lost or not isinstance(error, StoreOutdatedError):  # one of an older version is made again without loss
            reason = str(error).removeprefix(f"{self.path} ").partition("; `rankscope")[0]
            reason = reason.replace(f"{self.path.parent}{os.sep}", "")[:MAX_REASON]
            where = f"set aside as {quarantined.name}, " if quarantined and self._lock else ""
            self._set_aside = f"{reason}; {where}made again from the tapes{lost}"
        return quarantined

    def catch_up(self) -> dict[str, int]:
        """Tick thoroughly until nothing is left; returns the rows appended by table. Raises StoreBusyError."""
        rows: Counter[str] = Counter()
        while True:
            result = self.tick(thorough=True)
            rows.update(result.rows)
            if result.busy:
                raise StoreBusyError(f"{self.path} is in use by another process")
            if not result.lag:
                return dict(rows)

    def retire(self, before_ns: int) -> dict[str, int]:
        """Turn older calls into totals; returns the segments that may be removed: {path: places}. Raises StoreError."""
        import duckdb

        connection = connect_writer(self.path, wait_s=self._wait_s, threads=self._threads)
        try:
            if known_store(connection, self.path) != (self._state.store_id, self._state.generation):
                return {}  # another process wrote it: the next tick reads its positions
            fold_calls(connection, before_ns)
        except duckdb.Error as error:
            raise translated(error, self.path) from error
        finally:
            connection.close()
        self._identity = identity_of(self.path)
        return dict(retirable(self.run, self.folders, self._state, before_ns))

    def _carry_over(self, former: Path | None) -> str:
        """Keep the rows of retired tapes, which are in the former store alone; returns what to say of a loss."""
        if not retired_segments(self.run.node_dir(self.folders.node_rank) / INDEX_NAME):
            return ""
        try:
            if former is not None:
                carry_over(former, self.path)
                return ""
        except StoreError as error:
            logger.warning("Rows of retired tapes are lost: %s", error)
        return ", without the rows of retired tapes, which cannot be read"

    @property
    def _patience_s(self) -> float:
        """Seconds that the next tick waits for the file."""
        return min(self._wait_s * 2.0 ** min(self._num_busy, 16), max(self._wait_s, MAX_WAIT_S))

    def _is_idle(self, thorough: bool) -> bool:
        """Return True if the store is unchanged and the files hold nothing new."""
        identity = identity_of(self.path)
        if identity is None:
            return False
        if identity != self._identity:
            state = load_read_only(self.path, self._patience_s)
            if state is None:
                return False
            self._state = state
            self._identity = identity
        return next(self._tail.changes(self._state, tick=self._ticks, thorough=thorough), None) is None

    def _write(self, thorough: bool) -> Transfer:
        import duckdb

        is_new = identity_of(self.path) is None and identity_of(log_of(self.path)) is None
        connection = connect_writer(self.path, wait_s=self._patience_s, threads=self._threads)
        try:
            known = None if is_new else known_store(connection, self.path)
            connection.execute("BEGIN")
            if known is None:
                known = create(connection)
            if known != (self._state.store_id, self._state.generation):
                self._state = load(connection)
            redact = Redactor.of(self.run.private_manifest())
            transfer = Transfer(connection, self._dictionary, self._state, redact)
            if self._set_aside:
                transfer.take_problem(self.path.name, self._set_aside)
            with interruptible():
                self._take_all(transfer, thorough)
                changes = transfer.finish()
                for path, book in self._books.items():
                    if book.problem:
                        transfer.take_problem(path, book.problem)
                save(connection, changes)
                connection.execute("COMMIT")
        except duckdb.Error as error:
            raise translated(error, self.path) from error
        finally:
            connection.close()
        self._set_aside = ""
        self._state = self._state.updated(changes)
        self._identity = identity_of(self.path)
        return transfer

    def _take_all(self, transfer: Transfer, thorough: bool) -> None:
        for new in self._tail.changes(self._state, tick=self._ticks, thorough=thorough):
            if isinstance(new, Problem):
                transfer.take_problem(new.path, new.problem)
                if new.checked is not None:
                    transfer.changes.events[new.checked.path] = new.checked
            elif isinstance(new, NewEvents):
                transfer.take_events(new)
            else:
                transfer.take_segment(new, anchor_ns=self._anchor(new, transfer), names=self._book(new))
            if transfer.bytes_read >= TICK_BYTES:
                transfer.is_partial = True
                break

    def _anchor(self, new: NewRecords, transfer: Transfer) -> int:
        """Return epoch minus monotonic time (ns): one value for all segments of a rank.

        A node's tapes are written by process after process, maybe with a reboot between: each has its own.
        """
        name = new.folder.name
        if new.folder.is_node:
            return new.header.wall_minus_mono_ns
        known = self._state.anchors.get(name, transfer.changes.anchors.get(name))
        if known is None:
            known = anchor_of(self.run, self.folders.segments(new.folder))
            known = new.header.wall_minus_mono_ns if known is None else known
            transfer.changes.anchors[name] = known
        return known

    def _book(self, new: NewRecords) -> NameBook:
        name = f"{new.folder.name}/{new.header.table.names_file}"
        if name not in self._books:
            self._books[name] = NameBook(self.run.path / name, self._dictionary)
        return self._books[name]

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
