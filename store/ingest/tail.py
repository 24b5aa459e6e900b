"""Find new records and events of a node's ranks, at little cost when there are none.

    tail = Tail(run, NodeFolders(run, node_rank=0))
    for change in tail.changes(state, tick=1, thorough=False):
        change.complete, change.open_records, change.position      # or events, or a problem

Writing to a memory-mapped file does not change its modification time, so a live segment is polled by a small read of
its next record and its pending ones.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.files.safe_open import LINK, NO_FOLDER, NOT_PLAIN, open_plain, sync_file
from probes.tape.format.reader import MAX_SEGMENT_BYTES, Header, Segment, TapeError, read_header, read_segment
from probes.tape.format.writer import HEADER_BYTES, OPEN, segment_name
from probes.tape.rundir import RunDir
from probes.tape.segment_index import (
    BLANK,
    INDEX_NAME,
    check_index,
    index_signature,
    indexed_extents,
    missing_numbers,
    retired_segments,
)
from store.ingest.rank_folders import Folder, NodeFolders
from store.ingest.read_positions import EventPosition, ReadState, SegmentPosition

__all__ = ["KEPT", "NO_INDEX", "NewEvents", "NewRecords", "Problem", "Tail", "anchor_of"]

WINDOW_BYTES = 1 << 16  # a run of this many empty places is the end of the written part of a tape
FINAL_SEGMENTS = 3  # a writer completes records in its two newest segments; one more avoids a race
CHECKSUM = "#checksum"
"""Suffix of the path of a problem found by the node's checksum index."""
KEPT = "; the store has them"
"""End of a problem whose records were stored before the file lost them."""
NO_INDEX = "is gone: the records could not be checked for loss or alteration"
_ALTERED = ("was altered", "line ", "its ")
"""Begins of problems that do not tell whether the store read the file before."""
OLD_ATTEMPT_TICKS = 16  # files of earlier attempts are polled only once in this many ticks
RETIRED_ATTEMPT_TICKS = 2  # for this many ticks after a restart, the previous attempt is still polled at each tick


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRecords:
    """New records of one segment; `position` is the read position once they are stored."""

    folder: Folder
    header: Header
    position: SegmentPosition
    complete: npt.NDArray[Any]
    open_records: npt.NDArray[Any]
    problem: str
    keeps_open: bool = False
    """True if the tape was truncated; the store then keeps its open records of this tape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvents:
    """New events of one file."""

    folder: Folder
    position: EventPosition
    events: list[dict[str, Any]]
    problem: str
    is_partial: bool  # True if the file has more events that can be read immediately


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that cannot be read. An empty text clears an earlier problem."""

    path: str
    problem: str
    checked: EventPosition | None = None
    """Range covered by the last failed check against the node's checksum index."""


@dataclass(slots=True)
class _Seen:
    """State of a segment between polls, in addition to its position."""

    header: Header | None = None
    failed_tick: int = -1
    lost_end: bool = False


@dataclass(slots=True)
class Tail:
    """Polls all files of one node's ranks."""

    run: RunDir
    folders: NodeFolders
    syncs_events: bool = False
    """Fsync event files before their events are reported: if a power cut loses lines that are already in the store,
    lines appended later would be taken as already read.
    """
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _lines: dict[str, tuple[int, set[int]]] = field(default_factory=dict)
    """For each file of events: bytes read so far, and the hashes of its lines."""
    _newest: tuple[int, int] = (0, 0)  # (attempt, tick at which the attempt first appeared)

    def changes(self, state: ReadState, *, tick: int, thorough: bool) -> Iterator[NewRecords | NewEvents | Problem]:
        """Yield everything that differs from `state`.

        `thorough`: also read places that a live writer cannot have reached. This is for runs in which the writers have
        exited. `tick` counts up; calls with the same number poll the same files.
        """
        if thorough and self.folders.node_rank == 0:
            yield from self._refused_files(state)
        folders = self.folders.all()
        if thorough:
            yield from self._integrity(folders, state)
        newest_attempt = max((folder.attempt for folder in folders), default=0)
        if newest_attempt != self._newest[0]:
            self._newest = (newest_attempt, tick)
        resting = tick % OLD_ATTEMPT_TICKS != 0 and tick >= self._newest[1] + RETIRED_ATTEMPT_TICKS
        for folder in folders:
            old = not folder.is_node and folder.attempt < newest_attempt
            rest = old and resting and not thorough
            yield from self._segment_changes(folder, state, tick=tick, thorough=thorough, rest=rest)
            events = self._poll_events(folder, state, thorough=thorough)
            if events is not None:
                yield events

    def _refused_files(self, state: ReadState) -> Iterator[Problem]:
        """Report files that are refused, and clear problems of files that can be opened again."""
        refused = self.run.problems()
        for path, problem in refused.items():
            if state.problems.get(path) != problem:
                yield Problem(path=path, problem=problem)
        for path, problem in state.problems.items():
            if path not in refused and (path == "run.json" or problem in (LINK, NOT_PLAIN, NO_FOLDER)):
                yield Problem(path=path, problem="")

    def _integrity(self, folders: list[Folder], state: ReadState) -> Iterator[Problem]:
        """Report segments and events that differ from the node's checksum index, and gaps between segments.

        Files are read in full only if they or the index were written since the last check.
        """
        index = self.run.node_dir(self.folders.node_rank) / INDEX_NAME
        signature = index_signature(self.run.path, index)  # the store keeps it as the "read position" of a made-up file
        name = f"{index.relative_to(self.run.path).as_posix()}{CHECKSUM}"
        checked = state.events.get(name)
        if checked is not None and checked.next_byte == signature and state.problems.get(name) != NO_INDEX:
            return
        found = {f"{path}{CHECKSUM}": problem for path, problem in check_index(self.run.path, index)}
        if found:
            extents = indexed_extents(index)
            lost = {name for name, problem in found.items() if not problem.startswith(_ALTERED)}
            stored = {name for name in lost if state.holds(name.removesuffix(CHECKSUM), extents)}
            found |= {name: found[name] + KEPT for name in stored}
        if not signature and _was_watched(index.parent):
            found.setdefault(name, NO_INDEX)
        retired = retired_segments(index)
        for path, places in retired.items():
            if path not in state.segments:
                found[f"{path}{CHECKSUM}"] = f"was retired, and the store that had its {places} records is gone"
        for folder in folders:
            names = [path.rpartition("/")[2] for _, _, path in self.folders.segments(folder)]
            for table, number in missing_numbers(names):
                path = f"{folder.name}/{segment_name(table, number)}"
                if path not in retired:  # retention has not removed it
                    found[f"{path}{CHECKSUM}"] = "is missing: later segments are there"
        for path, problem in found.items():
            if state.problems.get(path) != problem:
                yield Problem(path=path, problem=problem)
        # A store without its tapes, as in a shared run, keeps what was found when they were there.
        for path in state.problems if signature or folders else ():
            if path.endswith(CHECKSUM) and path not in found:
                yield Problem(path=path, problem="")
        if signature:
            position = EventPosition(path=name, next_byte=signature)
            yield Problem(path=name, problem="", checked=position)

    def _segment_changes(
        self, folder: Folder, state: ReadState, *, tick: int, thorough: bool, rest: bool
    ) -> Iterator[NewRecords | Problem]:
        files = self.folders.segments(folder)
        newest = {table: number for table, number, _ in files}
        for table, number, path in files:
            known = state.segments.get(path)
            if known is not None and (known.done or rest):
                continue
            before = known or SegmentPosition(
                path=path, table=table, attempt=folder.attempt, rank=folder.rank, number=number
            )
            try:
                new = self._poll(folder, before, newest[table] - number, thorough)
            except (TapeError, OSError) as error:
                yield from self._failed(path, state, error, tick=tick, thorough=thorough)
                continue
            if new.position != known or len(new.complete) or state.problems.get(path, "") != new.problem:
                yield new
            if number == newest[table]:
                yield from _dropped(folder, new.header, state)

    def _poll(self, folder: Folder, before: SegmentPosition, num_newer: int, thorough: bool) -> NewRecords:
        seen = self._seen.setdefault(before.path, _Seen())
        final = num_newer >= FINAL_SEGMENTS
        last = before.next_place - 1
        # Read the last stored record again: if it is gone, the tape has lost its end, for instance in a power cut.
        checks_end = last >= 0 and (thorough or seen.header is None)
        segment = read_segment(
            self.run.path / before.path,
            before.next_place,
            np.array([*before.pending, last] if checks_end else before.pending, dtype=np.int64),
            header=seen.header,
            window_bytes=None if thorough or num_newer else WINDOW_BYTES,
        )
        _check_place(segment.header, folder, before)
        seen.header, seen.failed_tick = segment.header, -1
        records, places = segment.records, segment.indices
        if checks_end:
            has_end = last in places.tolist() or last in segment.taken_back.tolist()
            seen.lost_end = not has_end and not segment.damaged
            is_known = (places == last) if last not in before.pending else np.zeros(len(places), dtype=bool)
            records, places = records[~is_known], places[~is_known]
        pending = segment.pending if last in before.pending else segment.pending[segment.pending != last]
        is_open = records["state"] == OPEN
        open_records = records[is_open]
        keeps_open = seen.lost_end and not (places[~is_open] < before.next_place).any()
        full = num_newer > 0 and segment.end >= segment.header.capacity and not len(pending)
        position = replace(
            before,
            next_place=segment.end,
            pending=tuple(pending.tolist()),
            open_digest=before.open_digest if keeps_open else _digest(open_records),
            dropped=segment.header.dropped,
            done=final or full,
        )
        return NewRecords(
            folder=folder,
            header=segment.header,
            position=position,
            complete=records[~is_open],
            open_records=open_records,
            problem=_problem(segment, num_blank=len(pending) - len(open_records) if thorough else 0, seen=seen),
            keeps_open=keeps_open,
        )

    def _failed(
        self, path: str, state: ReadState, error: TapeError | OSError, *, tick: int, thorough: bool
    ) -> Iterator[Problem]:
        """Report a file that cannot be read, unless its writer may still be creating it."""
        seen = self._seen.setdefault(path, _Seen())
        seen.header = None
        if seen.failed_tick < 0:
            seen.failed_tick = tick
        if seen.failed_tick == tick and not thorough:
            return
        text = error.strerror or "unreadable" if isinstance(error, OSError) else str(error).partition(": ")[2]
        if isinstance(error, TapeError) and _is_blank(self.run.path / path):
            text = BLANK if thorough else ""  # in an ordinary tick no problem: its writer may still be creating it
        if state.problems.get(path, "") != text:
            yield Problem(path=path, problem=text)

    def _poll_events(self, folder: Folder, state: ReadState, *, thorough: bool) -> NewEvents | None:
        path = folder.path / "events.jsonl"
        name = f"{folder.name}/{path.name}"
        before = state.events.get(name) or EventPosition(path=name)
        try:
            size = path.lstat().st_size
            if size == before.next_byte:
                return None
            if self.syncs_events:
                sync_file(path)
            known = self._known_lines(path, before)
            events, byte, skipped = read_events(path, before.next_byte, known=known)
        except OSError:
            return None
        skipped += before.skipped_lines
        problem = _skipped_text(skipped) if skipped else ""
        if thorough and byte == before.next_byte:
            problem = problem or "the last line is torn"
        if byte == before.next_byte and (not thorough or problem == state.problems.get(name, "")):
            return None
        self._lines[name] = (byte, known)
        position = EventPosition(path=name, next_byte=byte, skipped_lines=skipped)
        partial = before.next_byte < byte < size
        return NewEvents(folder=folder, position=position, events=events, problem=problem, is_partial=partial)

    def _known_lines(self, path: Path, before: EventPosition) -> set[int]:
        """Hashes of the lines up to a read position. Another process may have read these lines."""
        byte, known = self._lines.get(before.path, (-1, set()))
        if byte != before.next_byte:
            known, byte = set(), 0
            while byte < before.next_byte:
                _, end, _ = read_events(path, byte, min(64 << 20, before.next_byte - byte), known=known)
                if end <= byte:
                    break
                byte = end
        return known


def _was_watched(folder: Path) -> bool:
    """Return True if a `watch` recorded the node and ended cleanly: then there is an index of checksums."""
    try:
        return any(folder.glob("health.*.tape")) and any(
            event["kind"] == event_kinds.WATCH_STOPPED for event in read_events(folder / "events.jsonl")[0]
        )
    except OSError:
        return False


def anchor_of(run: RunDir, files: list[tuple[str, int, str]]) -> int | None:
    """Wall-clock minus monotonic time (ns) when a rank's first segment was created; None if no segment is readable."""
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
            f"{position.path}: its header states table {claims[0]}, segment {claims[1]}, rank {claims[2]}, "
            f"attempt {header.attempt}; its name differs"
        )


def _problem(segment: Segment, *, num_blank: int, seen: _Seen) -> str:
    problems = []
    if segment.truncated:
        problems.append("the file is shorter than its header states; the existing part was read")
    elif seen.lost_end:
        problems.append(f"its last records were lost{KEPT}")
    if segment.damaged:
        problems.append(f"{segment.damaged} records have a damaged state")
    elif num_blank:
        problems.append(f"{num_blank} records before the last one were lost: their places are blank")
    return "; ".join(problems)


def _skipped_text(count: int) -> str:
    what = "1 line is not an event, or is a copy" if count == 1 else f"{count} lines are not events, or are copies"
    return f"{what} of one"


def _digest(records: npt.NDArray[Any]) -> str:
    """Digest of open records, to detect changes. Computed field by field, since padding bytes are undefined."""
    if not len(records):
        return ""
    return hashlib.blake2b(
        b"".join(records[name].tobytes() for name in records.dtype.names or ()), digest_size=8
    ).hexdigest()


def _dropped(folder: Folder, header: Header, state: ReadState) -> Iterator[Problem]:
    """Report records that the writer dropped from the whole tape; the newest segment's header has the count."""
    if header.dropped:
        path = f"{folder.name}/{header.table.name}.tape"
        text = f"{header.dropped} records were dropped by the writer: no space for a new segment"
        if state.problems.get(path) != text:
            yield Problem(path=path, problem=text)


def _is_blank(path: Path) -> bool:
    """Return True if a file holds only zeros: reserved, never written."""
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
