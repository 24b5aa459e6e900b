"""Read tapes, also while their writer runs, after it was killed, or if a file is damaged.

    for path in segment_paths(rank_dir, "steps"):
        segment = read_segment(path)
        segment.records["duration_ns"]        # numpy; only records whose state is OPEN or COMPLETE

Tapes are untrusted. Nothing in them is executed, sizes are checked against the file and against limits before memory is
allocated, and a layout may only have columns of the schema.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.safe_open import open_plain
from .schema import SCHEMA_VERSION, TABLES, Table
from .writer import COMPLETE, HEADER_BYTES, HEADER_PREFIX, JSON_OFFSET, MAGIC, OPEN, TAKEN_BACK

__all__ = ["Header", "Segment", "TapeError", "TooNewError", "read_header", "read_segment", "segment_paths"]

MAX_SEGMENT_BYTES = 64 << 20
"""Maximum size of one file; our writer makes segments of at most 2 MiB."""
# for more pending places than this, one read of the whole span is cheaper than one read each
_SPAN_PLACES = 64
# maximum bytes per read in a search of the whole tape, even if the file claims to be a gigabyte
_WHOLE_BYTES = 32 << 20
_MAX_COUNT = 1 << 62
_DTYPES = {"i64": "<i8", "f64": "<f8", "i32": "<i4", "name": "<u4", "bool": "i1"}


class TapeError(ValueError):
    """Raised if a file is not a readable tape. The message is one line with the file and the reason."""


class TooNewError(TapeError):
    """Raised if a tape was written by a newer version of Rankscope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of a segment."""

    table: Table
    rank: int
    attempt: int
    number: int
    first_record: int
    capacity: int
    record_bytes: int
    dtype: np.dtype[Any]
    sealed: bool
    dropped: int
    mono_ns: int
    wall_minus_mono_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Records read from one segment.

    `records` has one field per column plus `state`, and `indices` the records' places in the segment. `pending` are the
    places below `end` that are not COMPLETE yet (still open, or claimed and never written) and must be read again.
    `taken_back` are the places of records that the writer has withdrawn. `damaged` counts records with a state that no
    writer stores.
    """

    header: Header
    records: npt.NDArray[Any]
    indices: npt.NDArray[np.int64]
    pending: npt.NDArray[np.int64]
    taken_back: npt.NDArray[np.int64]
    end: int
    truncated: bool
    damaged: int


def segment_paths(rank_dir: Path, table: str) -> list[Path]:
    """The segments of a table's tape in one rank's folder, oldest first. Links and special files are left out."""
    return sorted(path for path in rank_dir.glob(f"{table}.[0-9]*.tape") if path.is_file() and not path.is_symlink())


def read_header(path: Path) -> Header:
    """Parse and check a segment's header. Raises TapeError, TooNewError."""
    with open(open_plain(path), "rb") as file:
        return _parse_header(path, file.read(HEADER_BYTES))


def read_segment(
    path: Path,
    start: int = 0,
    also: npt.NDArray[np.int64] | None = None,
    *,
    header: Header | None = None,
    window_bytes: int | None = None,
) -> Segment:
    """Read the records at place `start` and later. Also read the records at the places `also`, which were pending in an
    earlier read.

    With `window_bytes` the search for new records stops at the first range of that size without any, so that polling an
    unchanged tape costs one small read; without it the whole file is searched. `header`: the header from an earlier
    read, which saves parsing it again. Raises TapeError if the file is not a tape. If a file is shorter than its header
    says, the result has the existing records and `truncated`.

    1. Find the places in use and their states.
    2. Then read the records. A writer stores a record's fields before its state, so a reader must read the state before
       the fields: a record that was COMPLETE in step 1 is complete in step 2.
    """
    fd = open_plain(path)
    try:
        blob = os.pread(fd, HEADER_PREFIX.size if header else HEADER_BYTES, 0)
        header = _with_counters(path, header, blob) if header else _parse_header(path, blob)
        on_disk = (os.fstat(fd).st_size - HEADER_BYTES) // header.record_bytes
        available = max(0, min(header.capacity, on_disk))
        start = min(max(0, start), header.capacity)
        older = np.empty(0, dtype=np.int64) if also is None else np.unique(also)
        older = older[(older >= 0) & (older < min(start, available))]
        states = _search(fd, header, start, available, window_bytes)
        end = start + len(states)
        older_states = _read_places(fd, header, older)["state"]
        older_records, records = _read_places(fd, header, older), _read_range(fd, header, start, end).copy()
    finally:
        os.close(fd)
    if len(older_records) != len(older) or len(records) != len(states):
        raise TapeError(f"{path}: became shorter while it was read")
    places = np.arange(start, end, dtype=np.int64)
    if len(older):
        records, places = _joined([older_records, records]), np.concatenate([older, places])
        states = np.concatenate([older_states, states])
    records["state"] = states
    present = (states == OPEN) | (states == COMPLETE)
    return Segment(
        header=header,
        records=records[present],
        indices=places[present],
        pending=places[(states != COMPLETE) & (states != TAKEN_BACK)],
        taken_back=places[states == TAKEN_BACK],
        end=end,
        truncated=available < header.capacity,
        damaged=int(np.count_nonzero(states > TAKEN_BACK)),
    )


def _search(fd: int, header: Header, start: int, stop: int, window_bytes: int | None) -> npt.NDArray[np.uint8]:
    """Read the states from `start` up to the last place in use."""
    window = max(1, (window_bytes or _WHOLE_BYTES) // header.record_bytes)
    parts: list[npt.NDArray[np.uint8]] = []
    place = start
    while place < stop:
        part = _read_range(fd, header, place, min(place + window, stop))["state"].copy()
        if not len(part) or (window_bytes is not None and not part.any()):
            break
        parts.append(part)
        place += len(part)
        window *= 4 if window_bytes is not None else 1
    if not parts:
        return np.empty(0, dtype=np.uint8)
    states = np.concatenate(parts)
    used = np.flatnonzero(states)
    return states[: int(used[-1]) + 1 if len(used) else 0]


def _read_range(fd: int, header: Header, start: int, stop: int) -> npt.NDArray[Any]:
    """Read the raw records at the places `start` to `stop`. If the file ends earlier, the result is shorter."""
    blob = os.pread(fd, max(0, stop - start) * header.record_bytes, HEADER_BYTES + start * header.record_bytes)
    return np.frombuffer(blob, dtype=header.dtype, count=len(blob) // header.record_bytes)


def _read_places(fd: int, header: Header, places: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Read the raw records at single places, which must all be in the file."""
    if len(places) > _SPAN_PLACES:
        first = int(places[0])
        return _read_range(fd, header, first, int(places[-1]) + 1)[places - first]
    found = [_read_range(fd, header, place, place + 1) for place in places.tolist()]
    return _joined(found) if found else np.empty(0, dtype=header.dtype)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate records as bytes, with their padding; numpy's concatenation would drop it and copy field by field."""
    raw = np.dtype((np.void, parts[0].dtype.itemsize))
    return np.concatenate([part.view(raw) for part in parts]).view(parts[0].dtype)


def _with_counters(path: Path, header: Header, blob: bytes) -> Header:
    """Update a parsed header with the two values that its writer changes."""
    if len(blob) < HEADER_PREFIX.size or not blob.startswith(MAGIC):
        raise TapeError(f"{path}: its header was overwritten")
    _, _, _, sealed, dropped = HEADER_PREFIX.unpack(blob)
    return replace(header, sealed=bool(sealed), dropped=min(dropped, _MAX_COUNT))


def _parse_header(path: Path, blob: bytes) -> Header:
    try:
        magic, version, json_bytes, sealed, dropped = HEADER_PREFIX.unpack_from(blob)
    except struct.error:
        raise TapeError(f"{path}: too short for a tape ({len(blob)} bytes)") from None
    if magic != MAGIC:
        raise TapeError(f"{path}: not a tape (no magic number)")
    if version > SCHEMA_VERSION:
        raise TooNewError(
            f"{path}: written with schema {version}, this rankscope reads up to {SCHEMA_VERSION}: update rankscope"
        )
    try:
        text = json.loads(blob[JSON_OFFSET : JSON_OFFSET + json_bytes])
        table = TABLES[text["table"]]
        return _checked(table, text, bool(sealed), int(dropped))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TapeError(f"{path}: damaged header ({error})") from None


def _checked(table: Table, text: dict[str, Any], sealed: bool, dropped: int) -> Header:
    record_bytes, capacity = int(text["record_bytes"]), int(text["capacity"])
    if not (0 < record_bytes <= HEADER_BYTES and 0 < capacity and record_bytes * capacity <= MAX_SEGMENT_BYTES):
        raise ValueError(f"impossible sizes: {capacity} records of {record_bytes} bytes")
    known = {column.name: column.type for column in table.columns}
    names, formats, offsets = ["state"], ["u1"], [int(text["state_offset"])]
    for name, kind, offset in text["fields"]:
        if known.get(name) != kind:
            continue  # a column of another version; the others are usable
        names.append(name)
        formats.append(_DTYPES[kind])
        offsets.append(int(offset))
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": record_bytes})
    rank, attempt, number = int(text["rank"]), int(text["attempt"]), int(text["segment"])
    if not all(-1 <= value < 1 << 31 for value in (rank, attempt, number)):
        raise ValueError(f"impossible rank {rank}, attempt {attempt} or segment {number}")
    mono_ns, wall_ns = int(text["mono_ns"]), int(text["wall_ns"])
    if not all(abs(value) < _MAX_COUNT for value in (mono_ns, wall_ns, int(text["first_record"]))):
        raise ValueError("impossible clock or record number")
    return Header(
        table=table,
        rank=rank,
        attempt=attempt,
        number=number,
        first_record=int(text["first_record"]),
        capacity=capacity,
        record_bytes=record_bytes,
        dtype=dtype,
        sealed=sealed,
        dropped=min(dropped, _MAX_COUNT),
        mono_ns=mono_ns,
        wall_minus_mono_ns=wall_ns - mono_ns,
    )
