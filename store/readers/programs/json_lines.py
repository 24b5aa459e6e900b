"""Read JSON objects, one per line; damaged lines are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from store.readers.untrusted.external_files import SourceError

__all__ = ["objects"]

MAX_LINE_BYTES = 4 << 20


def objects(chunks: Iterator[bytes], prefix: bytes = b"") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line with an object after `prefix`. Raises SourceError for an endless
    line.
    """
    rest, number = b"", 0
    for chunk in _with_end(chunks):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            begin = line.find(prefix) if prefix else 0
            if begin < 0:
                continue
            try:
                found = json.loads(line[begin + len(prefix) :])
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield number, found
        if len(rest) > MAX_LINE_BYTES:
            raise SourceError(f"has a line of more than {MAX_LINE_BYTES:,} bytes")


def _with_end(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield from chunks
    yield b"\n"
