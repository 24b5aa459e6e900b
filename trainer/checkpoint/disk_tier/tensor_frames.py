"""Write tensors in the format of `torch.save` without pickling each time: a cached header, then the tensor's bytes.

    heads, file = Heads(), HashedFile(open(path, "xb", buffering=0))
    file.write(heads.of(tensor)); file.write(bytes_of(tensor)); file.flush()
    file.digest.hexdigest()                 # of all that was written
    torch.load(path, weights_only=True)     # the tensor

torch's format without a zip archive around it ends with the tensor's bytes, and what comes before depends on shape and
type only. So the thread that saves copies nothing large and holds the interpreter's lock for microseconds at a time: to
hash and to write bytes releases it. The lock is what the training thread would wait for.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor

__all__ = ["HashedFile", "Heads", "bytes_of"]

_GATHERED_BYTES = 256 << 10
"""Up to so many are gathered before they are written; what is larger by itself is not copied."""
_WRITE_BYTES = 4 << 20
_PATTERN = 0x5A


class Heads:
    """The heads of the tensors seen so far, by shape and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], bytes | None] = {}

    def of(self, tensor: Tensor) -> bytes | None:
        """The bytes before the tensor's own; None if torch writes such a tensor otherwise."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._known:
            self._known[key] = _head(tensor)
        return self._known[key]


def _head(tensor: Tensor) -> bytes | None:
    """Header for this shape and type, found by saving a pattern; None if the pattern is not at the end."""
    sample = torch.full((tensor.nbytes,), _PATTERN, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    buffer = io.BytesIO()
    try:
        torch.save(sample, buffer, _use_new_zipfile_serialization=False)
        whole = buffer.getvalue()
        head, rest = whole[: len(whole) - tensor.nbytes], whole[len(whole) - tensor.nbytes :]
        loaded = torch.load(io.BytesIO(head + bytes(bytes_of(sample))), weights_only=True)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError):
        return None
    same = loaded.shape == sample.shape and loaded.dtype == sample.dtype
    return head if same and rest == bytes([_PATTERN]) * tensor.nbytes else None


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a plain tensor in host memory, as they lie there if it is contiguous."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()  # a Buffer, which numpy's types deny
    return memoryview(array)


class HashedFile:
    """Writes to a raw file and hashes what it writes."""

    def __init__(self, file: io.RawIOBase | io.FileIO) -> None:
        self.digest = hashlib.blake2b(digest_size=32)
        self.size = 0
        """Bytes so far, those that are still gathered too."""
        self._file = file
        self._gathered = bytearray()

    def write(self, part: bytes | memoryview) -> None:
        """Append. Raises OSError. What `part` shows must not change before `flush`."""
        self.size += len(part)
        if len(part) < _GATHERED_BYTES:
            self._gathered += part
            if len(self._gathered) >= _GATHERED_BYTES:
                self.flush()
            return
        self.flush()
        view = memoryview(part)
        for start in range(0, len(view), _WRITE_BYTES):
            self._put(view[start : start + _WRITE_BYTES])

    def flush(self) -> None:
        """Write what was gathered. Raises OSError."""
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._put(memoryview(gathered))

    def _put(self, view: memoryview) -> None:
        """A raw file may take less than it is given, for instance the last bytes of a disk that is nearly full."""
        self.digest.update(view)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
