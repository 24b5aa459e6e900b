"""Finding what is new on a node's tapes and events, at little cost when nothing is.

    tail = Tail(run, node_rank=0)
    for look in tail.looks(state, thorough=False):
        look.complete, look.open_records, look.position      # or events

The times of a memory-mapped file say nothing about what was stored in it, so a live segment is looked at: its next
place and its pending ones, one small read. Folders are listed again only when they changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.reader import MAX_SEGMENT_BYTES, Header, Segment, TapeError, read_header, read_segment
from probes.tape.rundir import NO_MANIFEST, NODE_RANK, RunDir
from probes.tape.safe_open import LINK, NO_FOLDER, NOT_PLAIN, open_plain, read_plain
from probes.tape.schema import TABLES
from probes.tape.writer import HEADER_BYTES, OPEN
from store.ingest.read_positions import EventPosition, ReadState, SegmentPosition

__all__ = ["Folder", "NewEvents", "NewRecords", "ProblemLook", "Tail", "anchor_of", "folders_by_node", "node_of"]

WINDOW_BYTES = 1 << 16  # a stretch of a tape without a record in it: nothing comes after, the writer is not there yet
FINAL_SEGMENTS = 3  # a writer completes records in its two newest segments; with one more, no race is left
OLD_ATTEMPT_TICKS = 16  # tapes of an attempt that was followed by another are looked at once in so many ticks
LAST_WORD_TICKS = 2  # but in so many more at once: a restart may be quicker than a tick
FRESH_S = 2.0  # a folder changed so recently may change again within the same time stamp
_SEGMENT_NAME = re.compile(r"([a-z_]+)\.(\d{5,9})\.tape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The folder of one rank in one attempt, or of a node process (rank -1)."""

    path: Path
    name: str  # relative to the run
    attempt: int
    rank: int

    @property
    def is_node(self) -> bool:
        return self.rank == NODE_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRecords:
    """New records of one segment; `position` is the read position once they are stored."""

    folder: Folder
    header: Header
    position: SegmentPosition
    complete: npt.NDArray[Any]
    open_records: npt.NDArray[Any]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvents:
    """New events of one file."""

    folder: Folder
    position: EventPosition
    events: list[dict[str, Any]]
    problem: str
    is_partial: bool  # there is more to read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemLook:
    """A file that cannot be read, or can again (empty text)."""

    path: str
    problem: str


@dataclass(slots=True)
class _Seen:
    """State of a segment between two polls, beside its position."""

    header: Header | None = None
    failed_tick: int = -1


@dataclass(slots=True)
class Tail:
    """Looks at all files of one node's ranks."""

    run: RunDir
    node_rank: int
    given: Sequence[Folder] | None = None
    """The node's folders where the caller has scanned them; they are then fixed."""
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _owned: dict[str, bool] = field(default_factory=dict)
    _listings: dict[str, tuple[int, list[tuple[str, int, str]]]] = field(default_factory=dict)
    _folders: list[Folder] = field(default_factory=list)
    _signature: tuple[int, ...] = ()
    _newest: tuple[int, int] = (0, 0)  # attempt, and the tick in which it was first there

    def looks(self, state: ReadState, *, tick: int, thorough: bool) -> Iterator[NewRecords | NewEvents | ProblemLook]:
        """Everything that differs from `state`.

        `thorough` also looks where a live writer cannot have been: for runs whose writers are gone. `tick` counts up;
        within one number the same files are looked at.
        """
        if thorough and self.node_rank == 0:
            yield from self._odd_files(state)
        folders = self.folders()
        newest_attempt = max((folder.attempt for folder in folders), default=0)
        if newest_attempt != self._newest[0]:
            self._newest = (newest_attempt, tick)
        resting = tick % OLD_ATTEMPT_TICKS != 0 and tick >= self._newest[1] + LAST_WORD_TICKS
        for folder in folders:
            old = not folder.is_node and folder.attempt < newest_attempt
            rest = old and resting and not thorough
            yield from self._segment_looks(folder, state, tick=tick, thorough=thorough, rest=rest)
            events = self._poll_events(folder, state, thorough=thorough)
            if events is not None:
                yield events

    def _odd_files(self, state: ReadState) -> Iterator[ProblemLook]:
        """Update the files that are refused, and those that were and now can be opened."""
        odd = self.run.problems()
        for path, problem in odd.items():
            if state.problems.get(path) != problem:
                yield ProblemLook(path=path, problem=problem)
        for path, problem in state.problems.items():
            if path not in odd and problem in (LINK, NOT_PLAIN, NO_FOLDER, NO_MANIFEST):
                yield ProblemLook(path=path, problem="")

    def folders(self) -> list[Folder]:
        """The folders of this node, ranks first."""
        if self.given is not None:
            return list(self.given)
        signature = self._tree_signature()
        if signature != self._signature or _is_fresh(max(signature, default=0)):
            self._signature = signature
            self._folders = list(_all_folders(self.run))
        return [folder for folder in self._folders if self._is_ours(folder)]

    def files(self, folder: Folder) -> list[tuple[str, int, str]]:
        """(table, number, path relative to the run) of a folder's segments, oldest first."""
        try:
            changed = folder.path.stat().st_mtime_ns
        except OSError:
            return []
        known = self._listings.get(folder.name)
        if known is not None and known[0] == changed:
            return known[1]
        found = []
        for path in folder.path.iterdir():
            match = _SEGMENT_NAME.fullmatch(path.name)
            if match and match[1] in TABLES:  # what is no plain file is told when it is opened
                found.append((match[1], int(match[2]), f"{folder.name}/{path.name}"))
        # Steps first: a step that is read as ended has all its other records in what is read next.
        found.sort(key=lambda file: (file[0] != "steps", file))
        self._listings[folder.name] = (-1 if _is_fresh(changed) else changed, found)
        return found

    def _segment_looks(
        self, folder: Folder, state: ReadState, *, tick: int, thorough: bool, rest: bool
    ) -> Iterator[NewRecords | ProblemLook]:
        files = self.files(folder)
        newest = {table: number for table, number, _ in files}
        for table, number, path in files:
            known = state.segments.get(path)
            if known is not None and (known.done or rest):
                continue
            before = known or SegmentPosition(
                path=path, table=table, attempt=folder.attempt, rank=folder.rank, number=number
            )
            try:
                look = self._poll(folder, before, newest[table] - number, thorough)
            except (TapeError, OSError) as error:
                yield from self._failed(path, state, error, tick=tick, thorough=thorough)
                continue
            if look.position != known or len(look.complete) or state.problems.get(path, "") != look.problem:
                yield look
            if number == newest[table]:
                yield from _dropped(folder, look.header, state)

    def _poll(self, folder: Folder, before: SegmentPosition, num_newer: int, thorough: bool) -> NewRecords:
        seen = self._seen.setdefault(before.path, _Seen())
        final = num_newer >= FINAL_SEGMENTS
        segment = read_segment(
            self.run.path / before.path,
            before.next_place,
            np.array(before.pending, dtype=np.int64),
            header=seen.header,
            window_bytes=None if thorough or num_newer else WINDOW_BYTES,
        )
        _check_place(segment.header, folder, before)
        seen.header, seen.failed_tick = segment.header, -1
        is_open = segment.records["state"] == OPEN
        open_records = segment.records[is_open]
        full = num_newer > 0 and segment.end >= segment.header.capacity and not len(segment.pending)
        position = replace(
            before,
            next_place=segment.end,
            pending=tuple(segment.pending.tolist()),
            open_digest=_digest(open_records),
            dropped=segment.header.dropped,
            done=final or full,
        )
        return NewRecords(
            folder=folder,
            header=segment.header,
            position=position,
            complete=segment.records[~is_open],
            open_records=open_records,
            problem=_problem(segment),
        )

    def _failed(
        self, path: str, state: ReadState, error: TapeError | OSError, *, tick: int, thorough: bool
    ) -> Iterator[ProblemLook]:
        """Say so, unless the writer may just be making this file."""
        seen = self._seen.setdefault(path, _Seen())
        seen.header = None
        if seen.failed_tick < 0:
            seen.failed_tick = tick
        if seen.failed_tick == tick and not thorough:
            return
        text = error.strerror or "unreadable" if isinstance(error, OSError) else str(error).partition(": ")[2]
        if isinstance(error, TapeError) and _is_blank(self.run.path / path):
            text = ""  # its writer died while making it: it never held a record
        if state.problems.get(path, "") != text:
            yield ProblemLook(path=path, problem=text)

    def _poll_events(self, folder: Folder, state: ReadState, *, thorough: bool) -> NewEvents | None:
        path = folder.path / "events.jsonl"
        name = f"{folder.name}/{path.name}"
        before = state.events.get(name) or EventPosition(path=name)
        try:
            size = path.lstat().st_size
            if size == before.next_byte:
                return None
            events, byte, skipped = read_events(path, before.next_byte)
        except OSError:
            return None
        skipped += before.skipped_lines
        problem = f"{skipped} lines are no events" if skipped else ""
        if thorough and byte == before.next_byte:
            problem = problem or "the last line is torn"
        if byte == before.next_byte and (not thorough or problem == state.problems.get(name, "")):
            return None
        position = EventPosition(path=name, next_byte=byte, skipped_lines=skipped)
        partial = before.next_byte < byte < size
        return NewEvents(folder=folder, position=position, events=events, problem=problem, is_partial=partial)

    def _is_ours(self, folder: Folder) -> bool:
        known = self._owned.get(folder.name)
        if known is None:
            node = node_of(folder)
            if node is None:
                return False  # nothing written yet
            known = self._owned[folder.name] = node == self.node_rank
        return known

    def _tree_signature(self) -> tuple[int, ...]:
        """Changes whenever a folder of a rank or a node may have come or gone."""
        try:
            attempts = [entry for entry in self.run.tapes.iterdir() if entry.name.startswith("attempt-")]
            return (self.run.tapes.stat().st_mtime_ns, *(entry.stat().st_mtime_ns for entry in attempts))
        except OSError:
            return ()


def folders_by_node(run: RunDir) -> dict[int, list[Folder]]:
    """The folders of every node that wrote to this run's folder, ranks first; node 0 is always among them.

    For whoever reads all nodes at once: each for itself would look through the folders of all the others.
    """
    found: dict[int, list[Folder]] = {0: []}
    for folder in _all_folders(run):
        node = node_of(folder)
        if node is not None:
            found.setdefault(node, []).append(folder)
    return dict(sorted(found.items()))


def node_of(folder: Folder) -> int | None:
    """The node that a folder belongs to: what its rank said first; 0 if that is damaged, None if nothing is said yet.

    Several nodes may share the run's folder; each ingests its own ranks. A rank says who it is before its first
    record, so a folder with tapes and without that event is a damaged one.
    """
    if folder.is_node:
        return int(folder.path.name.rpartition("-")[2])
    try:
        lines = read_plain(folder.path / "events.jsonl", 1 << 16).split(b"\n")
    except OSError:
        lines = []
    for line in lines[:-1]:
        try:
            event = json.loads(line)
            if event["kind"] == event_kinds.RANK and isinstance(event["node_rank"], int):
                return max(0, event["node_rank"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return 0 if any(folder.path.glob("*.tape")) or len(lines) > 1 else None


def _all_folders(run: RunDir) -> Iterator[Folder]:
    for attempt, rank, path in run.rank_dirs():
        yield Folder(path=path, name=path.relative_to(run.path).as_posix(), attempt=attempt, rank=rank)
    for _, path in run.node_dirs():
        yield Folder(path=path, name=path.relative_to(run.path).as_posix(), attempt=0, rank=NODE_RANK)


def anchor_of(run: RunDir, files: list[tuple[str, int, str]]) -> int | None:
    """Wall minus monotonic clock at the making of the first of a rank's segments; None if none can be read."""
    headers = []
    for _, _, path in files:
        try:
            headers.append(read_header(run.path / path))
        except (TapeError, OSError):
            continue
    first = min(headers, key=lambda header: (header.mono_ns, header.table.name), default=None)
    return first.wall_minus_mono_ns if first else None


def _check_place(header: Header, folder: Folder, position: SegmentPosition) -> None:
    claims = (header.table.name, header.number, header.rank)
    place = (position.table, position.number, folder.rank)
    if claims != place or (header.attempt != folder.attempt and not folder.is_node):
        raise TapeError(
            f"{position.path}: its header says table {claims[0]}, segment {claims[1]}, rank {claims[2]}, "
            f"attempt {header.attempt}, its name does not"
        )


def _problem(segment: Segment) -> str:
    problems = []
    if segment.truncated:
        problems.append("the file is shorter than its header says; what is there was read")
    if segment.damaged:
        problems.append(f"{segment.damaged} records have a damaged state")
    return "; ".join(problems)


def _digest(records: npt.NDArray[Any]) -> str:
    """Tells open records from those of an earlier look; not from their raw bytes, whose padding may be anything."""
    if not len(records):
        return ""
    return hashlib.blake2b(
        b"".join(records[name].tobytes() for name in records.dtype.names or ()), digest_size=8
    ).hexdigest()


def _dropped(folder: Folder, header: Header, state: ReadState) -> Iterator[ProblemLook]:
    """Return the number of records dropped by the writer: of the whole tape, in the header of its newest segment."""
    if header.dropped:
        path = f"{folder.name}/{header.table.name}.tape"
        text = f"{header.dropped} records were dropped by the writer, no space for a new segment"
        if state.problems.get(path) != text:
            yield ProblemLook(path=path, problem=text)


def _is_blank(path: Path) -> bool:
    """Return True if a file holds nothing but zeros: reserved, never written."""
    try:
        with open(open_plain(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_SEGMENT_BYTES + HEADER_BYTES:
                return False
            while blob := file.read(1 << 20):
                if blob.count(0) != len(blob):
                    return False
    except OSError:
        return False
    return True


def _is_fresh(mtime_ns: int) -> bool:
    return abs(time.time_ns() - mtime_ns) < FRESH_S * 1e9
