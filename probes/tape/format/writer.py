"""Tapes: append-only files of fixed-size records that a rank writes through mmap.

    tape = TapeWriter(directory, TABLES["steps"], rank=3, attempt=0)
    slot = tape.append(OPEN, 40, now_ns, ...)      # one value per column, in the order of the table
    tape.rewrite(slot, COMPLETE, 40, now_ns, ...)
    batch = read_segment(path)                     # numpy records, also while the writer runs or after it was killed

Layout of a segment `<table>.<n>.tape`: a header of 4096 bytes (magic, live counters, JSON with the record layout,
rank, attempt and clock anchor), then `capacity` records. The last byte of a record is its state (EMPTY, OPEN,
COMPLETE, TAKEN_BACK). The state is stored last, so a reader never sees half a record. The pages belong to the kernel: a
writer killed by SIGKILL loses nothing that it stored.

A segment's blocks are reserved before the segment is mapped: storing to a sparse page on a full disk raises SIGBUS,
which would kill training. A failed reservation is retried later. `TapeWriter.dropped` counts the lost records.

On x86-64, stores become visible in program order. On weaker memory models, a concurrent reader may see a state before
its record. Readers must treat a live tape's newest records as provisional and read them again later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import operator
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .schema import SCHEMA_VERSION, UNSET, Column, Table

__all__ = [
    "COMPLETE", "EMPTY", "HEADER_BYTES", "MAGIC", "OPEN", "TAKEN_BACK", "TapeWriter", "record_layout", "segment_name",
]  # fmt: skip

EMPTY, OPEN, COMPLETE, TAKEN_BACK = 0, 1, 2, 3
MAGIC = b"RSTAPE\x00\x01"
HEADER_BYTES = 4096
HEADER_PREFIX = struct.Struct("=8sIIQQ")  # magic, schema version, JSON bytes, sealed (0 or 1), records dropped so far
SEALED_OFFSET = 16
DROPPED_OFFSET = 24
JSON_OFFSET = HEADER_PREFIX.size
RETRY_RECORDS = 1024  # records dropped between two attempts to reserve a segment on a full disk

logger = logging.getLogger("rankscope.probes")
_reported: set[Path] = set()
"""Folders of ranks for which lost records have been logged."""
_FORMATS = {"i64": "q", "f64": "d", "i32": "i", "name": "I", "bool": "b"}


def record_layout(table: Table) -> tuple[struct.Struct, list[Column]]:
    """The packed record of `table`: (struct with the state as its last field, columns in the record's order).

    Wide fields come first, so that every field is aligned and stored by one instruction.
    """
    columns = sorted(table.columns, key=lambda c: -struct.calcsize(_FORMATS[c.type]))
    body = "".join(_FORMATS[column.type] for column in columns)
    padding = -(struct.calcsize("=" + body) + 1) % 8
    return struct.Struct("=" + body + "x" * padding + "B"), columns


def segment_name(table: str, number: int) -> str:
    """File name of segment `number` of a table's tape."""
    return f"{table}.{number:05d}.tape"


def next_segment(directory: Path, table: str) -> int:
    """The first free segment number: a new writer (for example a new watch) continues after the previous writer."""
    numbers = [int(path.name.split(".")[-2]) for path in directory.glob(f"{table}.[0-9]*.tape")]
    return max(numbers, default=-1) + 1


class _Segment:
    """One mapped file and the record numbers that it holds."""

    __slots__ = ("buffer", "first", "last")

    def __init__(self, buffer: mmap.mmap, first: int, capacity: int) -> None:
        self.buffer = buffer
        self.first = first
        self.last = first + capacity


class TapeWriter:
    """Writes one table of one rank. Appending is safe from several threads and takes no lock."""

    def __init__(
        self,
        directory: Path,
        table: Table,
        *,
        rank: int,
        attempt: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        directory_fd: int = -1,
    ) -> None:
        """`directory_fd`: descriptor of the directory, kept open by the caller. Then all segments are created in this
        folder, even if the path leads to another folder by now."""
        self.table = table
        self.dropped = 0
        self._directory, self._directory_fd = directory, directory_fd
        self._rank = rank
        self._attempt = attempt
        self._clock_ns = clock_ns
        self._struct, self._record_columns = record_layout(table)
        self._record_bytes = self._struct.size
        self._capacity = (table.segment_bytes - HEADER_BYTES) // self._record_bytes
        order = {column.name: i for i, column in enumerate(table.columns)}
        # Reorders values to the record's order; in C, since it runs for every record of every collective.
        self._permute: Callable[[tuple[float, ...]], tuple[float, ...]]
        self._permute = operator.itemgetter(*(order[column.name] for column in self._record_columns))
        self._offsets: dict[str, tuple[int, struct.Struct]] = {}
        offset = 0
        for column in self._record_columns:
            one = struct.Struct("=" + _FORMATS[column.type])
            self._offsets[column.name] = (offset, one)
            offset += one.size
        self._numbers = itertools.count()  # next() is atomic under the GIL: no lock to take for a record
        self._lock = threading.Lock()
        self._segments = next_segment(directory, table.name)
        self._retry_at = 0
        self._previous: _Segment | None = None
        self._current = _Segment(mmap.mmap(-1, mmap.PAGESIZE), 0, 0)  # empty: the first record maps a real one
        self.closed = False

    def append(self, state: int, *values: float) -> int:
        """Store one record; returns its slot for `rewrite`, `set` and `complete`, or -1 if it was dropped."""
        number = next(self._numbers)
        segment = self._current
        if not segment.first <= number < segment.last:
            found = self._segment_for(number)
            if found is None:
                return -1
            segment = found
        offset = HEADER_BYTES + (number - segment.first) * self._record_bytes
        self._struct.pack_into(segment.buffer, offset, *self._permute(values), state)
        return number

    def opener(self, *columns: str) -> tuple[Callable[..., bytes], Callable[..., int]]:
        """Return (pack, open) for records that share most values, which are packed once: `rest = pack(*others)`;
        `slot = open(rest, *values)` stores a record as OPEN.

        `values` are the values of `columns`, which must be the record's first columns. `others` are the values of all
        other columns, in the order of the table.
        """
        ahead, others = self._record_columns[: len(columns)], self._record_columns[len(columns) :]
        if [column.name for column in ahead] != list(columns):
            raise ValueError(f"{self.table.name}: {columns} are not the first columns of a record")
        order = [column for column in self.table.columns if column not in ahead]
        permute = operator.itemgetter(*(order.index(column) for column in others))
        packed = struct.Struct("=" + "".join(_FORMATS[column.type] for column in others))
        head = "".join(_FORMATS[column.type] for column in ahead)
        rest_bytes = self._record_bytes - 1 - struct.calcsize("=" + head)
        pack_into = struct.Struct(f"={head}{rest_bytes}sB").pack_into
        record_bytes, numbers = self._record_bytes, self._numbers

        def pack(*values: float) -> bytes:
            return packed.pack(*permute(values))

        def open_record(rest: bytes, *values: float) -> int:
            number = next(numbers)
            segment: _Segment | None = self._current
            if segment is None or not segment.first <= number < segment.last:
                segment = self._segment_for(number)
                if segment is None:
                    return -1
            pack_into(segment.buffer, HEADER_BYTES + (number - segment.first) * record_bytes, *values, rest, OPEN)
            return number

        return pack, open_record

    def rewrite(self, slot: int, state: int, *values: float) -> None:
        """Store all values of a record again. The state is stored last, so that a reader gets the old or the new
        record, never a mixture."""
        located = self._locate(slot)
        if located is None:
            return
        buffer, offset = located
        end = offset + self._record_bytes - 1
        buffer[offset:end] = self._struct.pack(*self._permute(values), state)[:-1]
        buffer[end] = state

    def set(self, slot: int, column: str, value: float) -> None:
        """Change one value of a record in place."""
        located = self._locate(slot)
        if located is not None:
            offset, one = self._offsets[column]
            one.pack_into(located[0], located[1] + offset, value)

    def complete(self, slot: int) -> None:
        """Mark a record as finished."""
        located = self._locate(slot)
        if located is not None:
            located[0][located[1] + self._record_bytes - 1] = COMPLETE

    def finisher(self, *columns: str) -> Callable[..., None]:
        """A function `finish(slot, *values)` that stores these columns and then marks the record as finished.

        The columns must be adjacent in the record, so that one store writes all of them.
        """
        first, _ = self._offsets[columns[0]]
        places = [self._offsets[column] for column in columns]
        packed = struct.Struct("=" + "".join(one.format.removeprefix("=") for _, one in places))
        if [offset - first for offset, _ in places] != list(
            itertools.accumulate((one.size for _, one in places[:-1]), initial=0)
        ):
            raise ValueError(f"{self.table.name}: {columns} are not adjacent in a record")
        record_bytes, state_offset = self._record_bytes, self._record_bytes - 1
        pack_into = packed.pack_into

        def finish(slot: int, *values: float) -> None:
            segment: _Segment | None = self._current
            if segment is None or not segment.first <= slot < segment.last:
                segment = self._previous
                if segment is None or not segment.first <= slot < segment.last:
                    return  # the record was dropped, or is two segments back: its end stays unknown
            buffer, offset = segment.buffer, HEADER_BYTES + (slot - segment.first) * record_bytes
            pack_into(buffer, offset + first, *values)
            buffer[offset + state_offset] = COMPLETE

        return finish

    def unset_row(self) -> list[float]:
        """A row in which no column is recorded, to be filled in."""
        return [UNSET[column.type] for column in self.table.columns]

    def close(self) -> None:
        """Seal the current segment. Records that come later are dropped."""
        with self._lock:
            self.closed = True
            if self._current.last > 0:
                self._seal(self._current)
            self._current = _Segment(self._current.buffer, 0, 0)
            self._previous = None

    def _locate(self, slot: int) -> tuple[mmap.mmap, int] | None:
        for segment in (self._current, self._previous):
            if segment is not None and segment.first <= slot < segment.last:
                return segment.buffer, HEADER_BYTES + (slot - segment.first) * self._record_bytes
        return None  # the record was dropped, or is two segments back: its end stays unknown

    def _segment_for(self, number: int) -> _Segment | None:
        with self._lock:
            for segment in (self._current, self._previous):
                if segment is not None and segment.first <= number < segment.last:
                    return segment
            # too old for the mapped segments, or before the next attempt to reserve one on a full disk
            if self.closed or number < self._current.last or number < self._retry_at:
                self._count_dropped()
                return None
            # Begin where the last segment ended, not at `number`: another thread may not have stored a smaller one yet.
            # After a full disk, or if threads have taken more numbers than fit a segment, those between are dropped.
            first = self._current.last
            if self._retry_at or number >= first + self._capacity:
                first = number
            try:
                segment = self._new_segment(first)
            except OSError as error:
                self._retry_at = number + RETRY_RECORDS
                self._report(error)
                self._count_dropped()
                return None
            if self._current.last > 0:
                self._seal(self._current)
                self._previous = self._current
            self._current = segment
            self._retry_at = 0
            return segment

    def _report(self, error: OSError) -> None:
        """Log once per folder that records are lost, since a full disk stops all tapes of the rank."""
        if self._directory not in _reported:
            _reported.add(self._directory)
            with contextlib.suppress(Exception):  # handlers of the program may fail
                logger.warning(
                    "rankscope loses records that it cannot write to %s: %s", self._directory, error.strerror
                )

    def _count_dropped(self) -> None:
        self.dropped += 1
        if self._current.last > 0:
            struct.pack_into("=Q", self._current.buffer, DROPPED_OFFSET, self.dropped)

    def _seal(self, segment: _Segment) -> None:
        struct.pack_into("=Q", segment.buffer, SEALED_OFFSET, 1)

    def _new_segment(self, first: int) -> _Segment:
        size = HEADER_BYTES + self._capacity * self._record_bytes
        name = segment_name(self.table.name, self._segments)
        header = self._header(first)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        place, at = (self._directory / name, None) if self._directory_fd < 0 else (Path(name), self._directory_fd)
        fd = os.open(place, flags, 0o644, dir_fd=at)
        try:
            os.posix_fallocate(fd, 0, size)
            buffer = mmap.mmap(fd, size)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(place, dir_fd=at)
            raise
        finally:
            os.close(fd)
        buffer[: len(header)] = header
        self._segments += 1
        return _Segment(buffer, first, self._capacity)

    def _header(self, first: int) -> bytes:
        fields: list[list[Any]] = []
        for column in self._record_columns:
            fields.append([column.name, column.type, self._offsets[column.name][0]])
        text = json.dumps(
            {
                "table": self.table.name,
                "rank": self._rank,
                "attempt": self._attempt,
                "segment": self._segments,
                "first_record": first,
                "capacity": self._capacity,
                "record_bytes": self._record_bytes,
                "state_offset": self._record_bytes - 1,
                "fields": fields,
                "pid": os.getpid(),
                "mono_ns": self._clock_ns(),
                "wall_ns": time.time_ns(),
            },
            separators=(",", ":"),
        ).encode()
        if JSON_OFFSET + len(text) > HEADER_BYTES:
            raise ValueError(f"the layout of table {self.table.name} does not fit the tape's header")
        return HEADER_PREFIX.pack(MAGIC, SCHEMA_VERSION, len(text), 0, self.dropped) + text
