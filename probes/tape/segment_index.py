"""Index of a node's tapes with checksums, to detect loss or alteration of records.

    index = SegmentIndex(run.node_dir(0) / "segments.jsonl")     # `watch`, every half minute and at the end of a run
    index.add(run.path, "tapes/attempt-0/rank-00003/steps.00000.tape")
    index.sync()
    for path, problem in check_index(run.path, run.node_dir(0) / "segments.jsonl"): ...

When a file has changed, a line with its new state is appended to the index. Only the newest line about a file counts.
For a tape, the line has the number of places in use, the unfinished places, and a CRC-32 over the fixed part of the
header and all finished records, which no writer changes any more. For events and names it has the number of bytes and
their CRC-32. Each line has the digest of the previous line, so an altered or removed line breaks the chain. The index
is synced after each round. Before retention removes a segment, a line notes it as retired, with its number of places
and a CRC-32 of that number.

The checksums are computed by the process that reads the tapes anyway, at no cost for the ranks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .files.safe_open import open_plain, read_plain
from .format.reader import Header, TapeError, read_header
from .format.writer import COMPLETE, HEADER_BYTES, HEADER_PREFIX, JSON_OFFSET
from .unwritten import missing_newline

__all__ = [
    "BLANK",
    "INDEX_NAME",
    "MAX_INDEX_BYTES",
    "SegmentIndex",
    "check_index",
    "index_signature",
    "indexed_extents",
    "missing_numbers",
    "retired_segments",
]

INDEX_NAME = "segments.jsonl"
BLANK = "is blank: its records were lost, or it was reserved and never written"
MAX_INDEX_BYTES = 256 << 20
MAX_OPEN = 4096
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"([a-z_]+)\.(\d{5,9})\.tape")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """State of one file: places of a tape, or bytes of a text."""

    path: str
    extent: int
    crc: int
    open_places: tuple[int, ...] = ()
    is_retired: bool = False


class SegmentIndex:
    """Appends to the index of one node. Raises OSError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._known, self._last, _ = _read(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._is_dirty = False

    def add(self, root: Path, name: str, *, is_over: bool = False) -> bool:
        """Note the present state of a file below `root`; True if it has changed. An unreadable file is left out,
        because the ingestion reports it. `is_over`: the writer has ended, so the records that it left open are covered
        too."""
        try:
            entry = _state_of(root, name, _Entry(path=name, extent=-1, crc=0) if is_over else None)
        except (TapeError, OSError):
            return False
        if entry is None or self._known.get(name) == entry:
            return False
        self._append(entry)
        return True

    def retire(self, name: str, num_places: int) -> None:
        """Note that a segment will be removed because the store has all of it; call `sync` before removing it."""
        self._append(_Entry(path=name, extent=num_places, crc=_retired_crc(name, num_places), is_retired=True))

    def sync(self) -> None:
        """Sync the added lines to the disk."""
        if self._is_dirty:
            os.fsync(self._fd)
            self._is_dirty = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, entry: _Entry) -> None:
        fields: dict[str, Any] = {"path": entry.path, "extent": entry.extent, "crc": entry.crc}
        fields |= {"open": entry.open_places, "prev": self._last} | ({"retired": True} if entry.is_retired else {})
        line = json.dumps(fields, separators=(",", ":"))
        data = missing_newline(self._fd) + line.encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), INDEX_NAME)
        self._known[entry.path], self._last, self._is_dirty = entry, _digest(line), True


def check_index(root: Path, index: Path) -> Iterator[tuple[str, str]]:
    """Yield (path below `root`, problem) of every file that differs from the index, and of the index itself."""
    known, _, problem = _read(index)
    if problem:
        yield index.relative_to(root).as_posix(), problem
    for name, entry in known.items():
        problem = "" if entry.is_retired else _problem(root, entry)
        if problem:
            yield name, problem


def indexed_extents(index: Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """{path below the run: (number of places or bytes that the index covers, places in them that were unfinished)}."""
    return {name: (entry.extent, entry.open_places) for name, entry in _read(index)[0].items() if not entry.is_retired}


def retired_segments(index: Path) -> dict[str, int]:
    """{path below the run: number of places} of segments that retention has removed; only the store has their
    records."""
    return {name: entry.extent for name, entry in _read(index)[0].items() if entry.is_retired}


def missing_numbers(names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (table, number) of missing segments between existing ones of the same table."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    for table, found in sorted(numbers.items()):
        for number in range(min(found), max(found)):
            if number not in found:
                yield table, number


def index_signature(root: Path, index: Path) -> int:
    """A number that changes when the index or a file in it was written or removed; 0 without an index."""
    known, last, _ = _read(index)
    if not last:
        return 0
    digest = hashlib.blake2b(last.encode(), digest_size=7)
    for name in known:
        try:
            found = (root / name).lstat()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns}".encode())
        except OSError:
            digest.update(name.encode())
    return int.from_bytes(digest.digest(), "little")


def _problem(root: Path, entry: _Entry) -> str:
    noun = "records" if entry.path.endswith(".tape") else "bytes"
    try:
        found = _state_of(root, entry.path, limit=entry)
    except FileNotFoundError:
        return f"is missing: it had {entry.extent} {noun}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except TapeError as error:
        text = str(error).partition(": ")[2]
        return f"is damaged ({text}): it had {entry.extent} {noun}"
    if found is None:
        return f"{BLANK}; it had {entry.extent} {noun}"
    if found.extent < entry.extent:
        return f"is cut off: {found.extent} of {entry.extent} {noun} are left"
    return "" if found.crc == entry.crc else f"was altered: the checksum of its first {entry.extent} {noun} differs"


def _state_of(root: Path, name: str, limit: _Entry | None = None) -> _Entry | None:
    """State of a file, or None for an empty tape. `limit` states which part of the file counts. None: the whole file
    without unfinished records. An entry with an `extent` of -1: the whole file, unfinished records included. Any other
    entry: the part that this entry describes.
    """
    path = root / name
    if not name.endswith(".tape"):
        return _text_state(path, name, limit)
    blob = read_plain(path, HEADER_BYTES)
    if not blob.strip(b"\0"):
        return None
    header = read_header(path)
    (_, _, json_bytes, _, _) = HEADER_PREFIX.unpack_from(blob)
    crc = zlib.crc32(blob[JSON_OFFSET : JSON_OFFSET + json_bytes])
    searches = limit is None or limit.extent < 0
    rows = _rows(path, header, header.capacity if limit is None or searches else limit.extent)
    states = rows[:, _state_offset(header)]
    used = np.flatnonzero(states)
    extent = (int(used[-1]) + 1 if len(used) else 0) if searches else len(rows)
    rows, states = rows[:extent], states[:extent]
    left_out: Any
    if limit is None:
        left_out = np.flatnonzero(states != COMPLETE)
        if len(left_out) > MAX_OPEN:  # more than in any run so far; later records are not covered
            extent, left_out = int(left_out[MAX_OPEN]), left_out[:MAX_OPEN]
            rows = rows[:extent]
    else:
        left_out = np.array([place for place in limit.open_places if place < extent], dtype=np.int64)
    kept = np.delete(rows, left_out, axis=0) if len(left_out) else rows
    crc = zlib.crc32(np.ascontiguousarray(kept).data, crc)
    return _Entry(path=name, extent=extent, crc=crc, open_places=tuple(left_out.tolist()))


def _state_offset(header: Header) -> int:
    fields = header.dtype.fields
    return int(fields["state"][1]) if fields else header.record_bytes - 1


def _rows(path: Path, header: Header, most: int) -> Any:
    """The raw records of a tape that are in the file, one row of bytes each."""
    fd = open_plain(path)
    try:
        blob = os.pread(fd, min(most, header.capacity) * header.record_bytes, HEADER_BYTES)
    finally:
        os.close(fd)
    count = len(blob) // header.record_bytes
    return np.frombuffer(blob, dtype=np.uint8, count=count * header.record_bytes).reshape(count, header.record_bytes)


def _text_state(path: Path, name: str, limit: _Entry | None) -> _Entry:
    """Checksum the complete lines of a file; its last line may still be being written."""
    crc, size = 0, 0
    with open(open_plain(path), "rb") as file:
        if limit is None or limit.extent < 0:
            left = _whole_lines(file.fileno(), os.fstat(file.fileno()).st_size)
        else:
            left = limit.extent
        while left and (blob := file.read(min(left, _CHUNK_BYTES))):
            crc, size, left = zlib.crc32(blob, crc), size + len(blob), left - len(blob)
    return _Entry(path=name, extent=size, crc=crc)


def _whole_lines(fd: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        place = os.pread(fd, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def _read(path: Path) -> tuple[dict[str, _Entry], str, str]:
    """Return the last entry of each file, the digest of the last line, and the problem of the index."""
    known: dict[str, _Entry] = {}
    last = problem = ""
    try:
        lines = read_plain(path, MAX_INDEX_BYTES).split(b"\n")
    except FileNotFoundError:
        return {}, "", ""
    except OSError as error:
        return {}, "", f"cannot be read ({error.strerror})"
    for number, line in enumerate(lines[:-1], 1):
        try:
            found = json.loads(line)
            entry = _Entry(
                path=str(found["path"]), extent=int(found["extent"]), crc=int(found["crc"]),
                open_places=tuple(int(place) for place in found["open"]), is_retired=found.get("retired") is True,
            )  # fmt: skip
            if ".." in Path(entry.path).parts or entry.path.startswith("/") or b"\0" in os.fsencode(entry.path):
                raise ValueError(entry.path)
            if min(0, entry.extent, *entry.open_places) < 0:
                raise ValueError(entry.extent)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # OverflowError: a number like 1e999
            problem = problem or f"line {number} is damaged"
            last = _digest(line.decode("utf-8", "replace"))
            continue
        if entry.is_retired and entry.crc != _retired_crc(entry.path, entry.extent):
            problem = problem or f"line {number} was altered: its checksum differs"
        if found.get("prev") != last:
            problem = problem or f"line {number} does not follow the one before: lines were altered or removed"
        known[entry.path], last = entry, _digest(line.decode("utf-8", "replace"))
    if lines[-1]:  # an unfinished last line: the next append completes it to a line, so the chain continues from it
        last = _digest(lines[-1].decode("utf-8", "replace"))
    if lines[-1].strip(b"\0"):
        problem = problem or "its last line is torn"
    elif lines[-1]:
        problem = problem or "its end is blank"
    return known, last, problem


def _retired_crc(name: str, num_places: int) -> int:
    """Return the checksum that protects a line about a retired segment, since no file is left to compare with."""
    return zlib.crc32(f"{name} {num_places}".encode())


def _digest(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
