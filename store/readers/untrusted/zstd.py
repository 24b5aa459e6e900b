"""Decompress Zstandard: by Python's own module (3.14), else by pyarrow where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ZSTD", "ZstdError", "zstd_chunks"]

ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a compressed file."""


class ZstdError(ValueError):
    """A compressed file that cannot be read; the text says why."""


def zstd_chunks(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    """The file's content in pieces. Raises ZstdError."""
    with open(path, "rb") as file, _opened(file) as stream:
        while True:
            try:
                chunk = stream.read(chunk_bytes)
            except Exception as error:  # each library has its own types
                raise ZstdError(f"is damaged or cut off: {str(error)[:100]}") from None
            if not chunk:
                return
            yield bytes(chunk)


def _opened(file: Any) -> Any:
    try:
        return importlib.import_module("compression.zstd").ZstdFile(file)
    except ModuleNotFoundError:
        pass
    try:
        return importlib.import_module("pyarrow").CompressedInputStream(file, "zstd")
    except ModuleNotFoundError:
        raise ZstdError("is compressed by zstd: unpack it, or pip install pyarrow") from None
