"""Events: rare occurrences, one JSON object per line in `events.jsonl`.

    events = EventWriter(path, attempt=0, rank=3)
    events.write(event_kinds.ROLLBACK, step=40, from_step=40, to_step=30)

Appending is one `write` to a file opened with O_APPEND, so several processes of a node may share a file and a killed
writer leaves at most one torn last line, which the reader skips and counts; the next event begins its own line. Lines
that the disk refuses are kept in memory, up to `MAX_UNWRITTEN_BYTES`, and written later; at `close` they go to the
temporary folder (`unwritten`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..fail_open import DISK_ERRNOS, failing_open, record_error
from .event_kinds import EVENT_KINDS, unknown_fields
from .files.checked_descriptor import CheckedDescriptor
from .files.safe_open import open_plain
from .unwritten import MAX_UNWRITTEN_BYTES, missing_newline, save_unwritten

__all__ = ["EventWriter", "read_events"]

MAX_LINE_BYTES = 1 << 20


class EventWriter:
    """Appends events of one rank (or of a node process: rank -1)."""

    def __init__(self, path: Path, *, attempt: int, rank: int) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self._file = CheckedDescriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._unwritten: deque[bytes] = deque()
        self.saved_to: Path | None = None
        """File in which `close` saved the lines that the disk refused."""

    def write(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Append one event of a kind of the catalogue; an error is counted, never raised.

        Fields that the catalogue does not list are written too, but counted as an error.
        """
        if kind not in EVENT_KINDS:
            record_error("events.unknown_kind", ValueError(f"no event kind {kind!r} in the catalogue"))
        elif odd := unknown_fields(kind, detail):
            record_error("events.unknown_field", ValueError(f"event kind {kind!r} has no field {', '.join(odd)}"))
        self.write_any(kind, step=step, **detail)

    def write_any(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Append one event of any kind, such as a kind of the user's."""
        with failing_open("events"):
            # Record both clocks, because the wall clock may be changed during the run. A time that the caller passes
            # is by the wall clock only.
            mono = {} if "wall_ns" in detail else {"mono_ns": time.monotonic_ns()}
            line = {
                "wall_ns": time.time_ns(),
                **mono,
                "attempt": self.attempt,
                "rank": self.rank,
                "kind": kind,
                "step": step,
                **detail,
            }
            data = (json.dumps(_finite(line), default=str, separators=(",", ":")) + "\n").encode()
            if len(data) > MAX_LINE_BYTES:
                raise ValueError(f"event {kind!r} of {len(data)} bytes is above the limit of {MAX_LINE_BYTES}")
            if sum(map(len, self._unwritten)) + len(data) > MAX_UNWRITTEN_BYTES:
                raise ValueError(f"event {kind!r} is dropped: too many before it could not be written")
            self._unwritten.append(data)
            self._write_out()

    @property
    def has_unwritten(self) -> bool:
        """True if the disk refused the last lines."""
        return bool(self._unwritten)

    def retry(self) -> None:
        """Write the lines that the disk refused before."""
        if self._unwritten:
            with contextlib.suppress(OSError):
                self._write_out()

    def close(self) -> None:
        """Close the file. Lines that the disk refused are saved elsewhere."""
        if self._file.is_open:
            self.retry()
            self._file.close()
            if self._unwritten:
                self.saved_to = save_unwritten(self.path, self._unwritten)
                self._unwritten.clear()

    def _write_out(self) -> None:
        """Write the lines in order; several threads may call this, and each takes the next line. Raises OSError."""
        with contextlib.suppress(IndexError):
            while True:
                line = self._unwritten.popleft()
                try:
                    fd = self._file.number()
                    data = missing_newline(fd) + line
                    is_torn = os.write(fd, data) != len(data)
                except OSError as error:
                    if error.errno in DISK_ERRNOS:
                        self._unwritten.appendleft(line)
                    raise
                if is_torn:
                    self._unwritten.appendleft(line)
                    return


def _finite(value: Any) -> Any:
    """NaN and Inf as text: JSON has neither, and DuckDB refuses Python's spelling."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_events(
    path: Path, start_byte: int = 0, limit_bytes: int = 64 << 20, *, known: set[int] | None = None
) -> tuple[list[dict[str, Any]], int, int]:
    """Read whole lines from `start_byte`: (events, position after the last whole line, lines skipped).

    A last line without its newline is not consumed, because it may still be being written. A repeated line is skipped:
    each line has a time in nanoseconds, so an equal one is a copy. `known`: hashes of the lines before `start_byte`;
    the hashes of the lines read are added to it.
    """
    known = set() if known is None else known
    try:
        with open(open_plain(path), "rb") as file:
            file.seek(start_byte)
            blob = file.read(limit_bytes)
            end = blob.rfind(b"\n") + 1
            if end == 0 and len(blob) == limit_bytes:  # a line longer than any event: skip it
                return [], _next_data(file.fileno(), start_byte + len(blob)), 1
    except FileNotFoundError:
        return [], start_byte, 0
    events: list[dict[str, Any]] = []
    skipped = 0
    for line in filter(None, blob[:end].split(b"\n")):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
                raise ValueError("not an event")
            if (mark := hash(line)) in known:
                raise ValueError("a copy of an earlier event")
            known.add(mark)
            events.append(event)
        except (ValueError, RecursionError):
            skipped += 1
    return events, start_byte + end, skipped


def _next_data(fd: int, start_byte: int) -> int:
    """Position of the next stored byte: a sparse file may have a hole of a terabyte."""
    try:
        return os.lseek(fd, start_byte, os.SEEK_DATA)
    except OSError:  # only a hole follows, or the file system does not support this
        return os.fstat(fd).st_size
