"""Read the text of a program's file, which may be UTF-16 or contain terminal colours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from store.readers.logs.plain_text import plain_bytes, text_chunks
from store.readers.untrusted.external_files import MAX_UNPACKED_BYTES, read_whole, unpacked

__all__ = ["is_number", "read_chunks", "read_text"]


def read_text(path: Path, limit: int) -> str:
    """Text of a file of at most `limit` bytes, without terminal colours. Raises SourceError."""
    return plain_bytes(read_whole(path, limit)[0]).decode("utf-8", "replace")


def read_chunks(path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> Iterator[bytes]:
    """Yield the text in chunks. Raises SourceError if the file is truncated or exceeds the limit."""
    return text_chunks(unpacked(path, max_bytes))


def is_number(text: str) -> bool:
    """Return True if `float` accepts the text, including NaN and Inf."""
    try:
        float(text)
    except ValueError:
        return False
    return True
