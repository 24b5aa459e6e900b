"""Interned names: an operation, parameter or caller is written once as text, and afterwards as a 32-bit number.

A name is written to `names.jsonl` before the first record that refers to it, so a reader can resolve every record's
names, no matter when the writer dies. Number 0 means "no name".
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

from ..files.checked_descriptor import CheckedDescriptor
from ..files.safe_open import open_plain
from ..unwritten import missing_newline

__all__ = ["NameWriter", "read_names"]

MAX_NAME_CHARS = 512
MAX_NAMES = 1 << 20
MAX_LINE_BYTES = 1 << 16
MAX_BYTES = 256 << 20
OVERFLOW_ID = 1
"""Name used for all new names beyond `MAX_NAMES`: a loop that makes names must not fill the disk."""


class NameWriter:
    """Gives each distinct text a number and appends it to `names.jsonl`. Calling it costs one dict look-up."""

    def __init__(self, path: Path) -> None:
        self._file = CheckedDescriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        # In a folder that was written before (by an earlier watch) names keep their numbers.
        self._ids: dict[str, int] = {text: number for number, text in read_names(path)[0].items()}
        self._next = max(self._ids.values(), default=0) + 1
        self._lock = threading.Lock()
        self("(too many names)")  # in a new folder the first name, so it gets `OVERFLOW_ID`

    def __call__(self, text: str) -> int:
        """The number of `text`, from 1; 0 for the empty text, and for a new one after `close`.

        Raises OSError if a new name cannot be written.
        """
        known = self._ids.get(text)
        if known is not None:
            return known
        if not text:
            return 0
        with self._lock:
            known = self._ids.get(text)
            if known is not None:
                return known
            if not self._file.is_open:
                return 0  # records after `close`, which would refer to it, are dropped as well
            if len(self._ids) >= MAX_NAMES:
                return OVERFLOW_ID
            number, fd = self._next, self._file.number()
            line = json.dumps({"id": number, "name": text[:MAX_NAME_CHARS]}) + "\n"
            data = missing_newline(fd) + line.encode()
            if os.write(fd, data) != len(data):  # the disk is full; otherwise a reader never sees part of a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "names.jsonl")
            self._next += 1
            self._ids[text] = number
            return number

    def close(self) -> None:
        """Close the file; the numbers stay known."""
        self._file.close()


def read_names(path: Path) -> tuple[dict[int, str], int]:
    """Read `names.jsonl`: ({number: text}, lines skipped because they were torn or not ours).

    Raises OSError if it is not a plain file.
    """
    names: dict[int, str] = {}
    skipped = 0
    try:
        fd = open_plain(path)
    except FileNotFoundError:
        return names, 0
    with open(fd, "rb") as file:
        while file.tell() < MAX_BYTES and (line := file.readline(MAX_LINE_BYTES)):
            if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                return names, skipped + 1  # longer than any valid line: ignore the rest
            if line == b"\n":
                continue
            try:
                entry = json.loads(line)
                number = int(entry["id"])
                if 0 < number <= MAX_NAMES:
                    names[number] = str(entry["name"])[:MAX_NAME_CHARS]
                else:
                    skipped += 1
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                skipped += 1
    return names, skipped
