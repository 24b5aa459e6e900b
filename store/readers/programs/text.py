"""The text of a program's file: a shell may have written it in UTF-16, and a terminal's colours may be in it."""

from __future__ import annotations

from pathlib import Path

from store.readers.external_files import read_whole
from store.readers.logs.plain_text import plain_bytes

__all__ = ["read_text"]


def read_text(path: Path, limit: int) -> str:
    """The text without colours, at most `limit` bytes of the file. Raises SourceError."""
    return plain_bytes(read_whole(path, limit)[0]).decode("utf-8", "replace")
