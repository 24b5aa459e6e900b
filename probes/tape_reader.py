"""Reading tapes: while the writer runs, after it was killed, and when somebody damaged the file.

    for path in segment_paths(rank_dir, "steps"):
        segment = read_segment(path)
        segment.records["duration_ns"]        # numpy; only records whose state is OPEN or COMPLETE

Nothing in a tape is executed or believed: sizes are checked against the file and against limits before memory is
taken, and a layout is accepted only for columns of the schema.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .schema import SCHEMA_VERSION, TABLES, Table
from .tape import COMPLETE, EMPTY, HEADER_BYTES, HEADER_PREFIX, JSON_OFFSET, MAGIC

__all__ = ["Segment", "TapeError", "TooNewError", "read_header", "read_segment", "segment_paths"]

MAX_SEGMENT_BYTES = 1 << 30
_DTYPES = {"i64": "<i8", "f64": "<f8", "i32": "<i4", "name": "<u4", "bool": "i1"}


class TapeError(ValueError):
    """A file is not a readable tape; the text is one line that says which file and why."""


class TooNewError(TapeError):
    """A tape was written by a newer Rankscope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a segment says of itself."""

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
    wall_minus_mono_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Records read from one segment.

    `records` has one field a column plus `state`; `indices` are the records' places in the segment; `pending` are
    places below `end` that are not COMPLETE yet (still open, or claimed and never written), to be looked at again.
    """

    header: Header
    records: npt.NDArray[Any]
    indices: npt.NDArray[np.int64]
    pending: npt.NDArray[np.int64]
    end: int
    truncated: bool


def segment_paths(rank_dir: Path, table: str) -> list[Path]:
    """The segments of a table's tape in one rank's folder, oldest first. Links and other odd files are left out."""
    return sorted(path for path in rank_dir.glob(f"{table}.[0-9]*.tape") if path.is_file() and not path.is_symlink())


def read_header(path: Path) -> Header:
    """Parse and check a segment's header. Raises TapeError, TooNewError."""
    with path.open("rb") as file:
        return _parse_header(path, file.read(HEADER_BYTES))


def read_segment(path: Path, start: int = 0, also: npt.NDArray[np.int64] | None = None) -> Segment:
    """Read the records from place `start` on, and those at the places `also` (pending ones of an earlier look).

    Raises TapeError if the file is not a tape of ours. A file shorter than its header says gives what is there and
    `truncated`.
    """
    with path.open("rb") as file:
        header = _parse_header(path, file.read(HEADER_BYTES))
        wanted = np.arange(start, header.capacity, dtype=np.int64)
        file.seek(HEADER_BYTES + start * header.record_bytes)
        blob = file.read((header.capacity - start) * header.record_bytes)
        whole = len(blob) // header.record_bytes
        fresh = np.frombuffer(blob, dtype=header.dtype, count=whole)
        used = np.flatnonzero(fresh["state"])
        end = start + (int(used[-1]) + 1 if len(used) else 0)
        fresh, wanted = fresh[: end - start], wanted[: end - start]
        if also is not None and len(also):
            older = [_read_one(file, header, int(i)) for i in also if 0 <= i < start]
            rows = np.frombuffer(b"".join(older), dtype=header.dtype)
            fresh = np.concatenate([rows, fresh])
            wanted = np.concatenate([np.asarray(also[: len(rows)], dtype=np.int64), wanted])
    present = fresh["state"] != EMPTY
    return Segment(
        header=header,
        records=fresh[present],
        indices=wanted[present],
        pending=wanted[fresh["state"] != COMPLETE],
        end=end,
        truncated=whole < header.capacity - start,
    )


def _read_one(file: Any, header: Header, index: int) -> bytes:
    file.seek(HEADER_BYTES + index * header.record_bytes)
    blob: bytes = file.read(header.record_bytes)
    return blob.ljust(header.record_bytes, b"\x00")


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
            continue  # a column of another version: the rest is still good
        names.append(name)
        formats.append(_DTYPES[kind])
        offsets.append(int(offset))
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": record_bytes})
    return Header(
        table=table,
        rank=int(text["rank"]),
        attempt=int(text["attempt"]),
        number=int(text["segment"]),
        first_record=int(text["first_record"]),
        capacity=capacity,
        record_bytes=record_bytes,
        dtype=dtype,
        sealed=sealed,
        dropped=dropped,
        wall_minus_mono_ns=int(text["wall_ns"]) - int(text["mono_ns"]),
    )
