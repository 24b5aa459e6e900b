"""Write tensors in the format of `torch.save` without pickling each one: a cached header, then the tensor's bytes.

    headers, file = Headers(), HashedFile(open(path, "xb", buffering=0))
    file.write(headers.of(tensor)); file.write(bytes_of(tensor)); file.flush()
    file.digest.hexdigest()                 # of everything written
    torch.load(path, weights_only=True)     # the tensor

torch's legacy (non-zip) format ends with the tensor's bytes, and the header before them depends only on shape and type.
In this way the saving thread makes no large copies. Hashing and writing release the GIL, so the thread holds it only
for microseconds, and the training thread does not wait for it.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor

__all__ = ["HashedFile", "Headers", "bytes_of"]

_BUFFER_BYTES = 256 << 10
"""Parts smaller than this are buffered. Larger parts are written without a copy."""
_WRITE_BYTES = 4 << 20
_PATTERN = 0x5A


class Headers:
    """Cached headers by shape and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], bytes | None] = {}

    def of(self, tensor: Tensor) -> bytes | None:
        """Return the bytes before the tensor's data; None if torch uses another format for such a tensor."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._known:
            self._known[key] = _header(tensor)
        return self._known[key]


def _header(tensor: Tensor) -> bytes | None:
    """Header for this shape and type, found by saving a pattern; None if the file does not end with the pattern."""
    sample = torch.full((tensor.nbytes,), _PATTERN, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    buffer = io.BytesIO()
    try:
        torch.save(sample, buffer, _use_new_zipfile_serialization=False)
        saved = buffer.getvalue()
        header, data = saved[: len(saved) - tensor.nbytes], saved[len(saved) - tensor.nbytes :]
        loaded = torch.load(io.BytesIO(header + bytes(bytes_of(sample))), weights_only=True)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError):
        return None
    is_same = loaded.shape == sample.shape and loaded.dtype == sample.dtype
    return header if is_same and data == bytes([_PATTERN]) * tensor.nbytes else None


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a plain CPU tensor; no copy if it is contiguous."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()  # a Buffer, but not typed as one
    return memoryview(array)


class HashedFile:
    """Writes to a raw file and hashes what it writes."""

    def __init__(self, file: io.RawIOBase | io.FileIO) -> None:
        self.digest = hashlib.blake2b(digest_size=32)
        self.size = 0
        """Bytes so far, including buffered ones."""
        self._file = file
        self._buffer = bytearray()

    def write(self, part: bytes | memoryview) -> None:
        """Append to the file. Raises OSError."""
        self.size += len(part)
        if len(part) < _BUFFER_BYTES:
            self._buffer += part
            if len(self._buffer) >= _BUFFER_BYTES:
                self.flush()
            return
        self.flush()
        view = memoryview(part)
        for start in range(0, len(view), _WRITE_BYTES):
            self._write_all(view[start : start + _WRITE_BYTES])

    def flush(self) -> None:
        """Write what is buffered. Raises OSError."""
        if self._buffer:
            buffer, self._buffer = self._buffer, bytearray()
            self._write_all(memoryview(buffer))

    def _write_all(self, view: memoryview) -> None:
        """Hash and write everything: a raw file's `write` may be partial, for instance on a nearly full disk."""
        self.digest.update(view)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
