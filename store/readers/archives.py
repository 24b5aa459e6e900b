"""Unpack archives of evidence (.tar, .tar.gz, .tar.zst, .zip) into a folder, within limits.

    problems = expand(Path("evidence.tar.gz"), into)

Only plain files are written, under names of their own: no member can lead out of the folder, and links, devices and
whatever is over the limits is left out and reported.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from store.readers.external_files import SourceError, head, unpacked

__all__ = ["expand", "is_archive"]

MAX_BYTES = 32 << 30
"""Of all members together."""
MAX_MEMBERS = 20_000
MAX_RATIO = 1200
"""Unpacked bytes for one packed byte: gzip reaches 1,030 on zeros, a bomb of nested archives is not followed at all."""
_PIECE = 1 << 20
_TAR_MARK = slice(257, 262)


def is_archive(first: bytes) -> str:
    """`tar` or `zip` by the first bytes of the (unzipped) content; empty for anything else."""
    if first[_TAR_MARK] == b"ustar":
        return "tar"
    return "zip" if first.startswith(b"PK\x03\x04") else ""


def expand(path: Path, into: Path) -> list[tuple[str, str]]:
    """Write the members' plain files below `into`; returns (member, why it was left out). Raises SourceError."""
    problems: list[tuple[str, str]] = []
    budget = _Budget(min(MAX_BYTES, max(path.stat().st_size, 4096) * MAX_RATIO))
    try:
        members = _zip(path, problems) if is_archive(head(path, 512)) == "zip" else _tar(path, problems)
        for number, (name, stream, modified_s) in enumerate(members):
            if number >= MAX_MEMBERS:
                raise SourceError(f"holds more than {MAX_MEMBERS:,} files: the rest was not read")
            target = _target(into, name)
            if target is None:
                problems.append((name, "has a name that leads out of the archive: left out"))
                continue
            _write(stream, target, budget)
            os.utime(target, (modified_s, modified_s))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError) as error:
        raise SourceError(f"is damaged or cut off: {str(error)[:100]}") from None
    return problems


class _Budget:
    def __init__(self, left_bytes: int) -> None:
        self._left = left_bytes

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise SourceError("unpacks to more than is read: the rest was not read")


def _tar(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[str, IO[bytes], float]]:
    with tarfile.open(fileobj=_Stream(unpacked(path, MAX_BYTES)), mode="r|") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is not None:
                yield member.name, stream, max(0.0, float(member.mtime))
            elif not member.isdir():
                problems.append((member.name, "is a link or a device: left out"))


def _zip(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[str, IO[bytes], float]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                problems.append((member.filename, "is encrypted: left out"))
                continue
            with archive.open(member) as stream:
                yield member.filename, stream, path.stat().st_mtime


def _target(into: Path, name: str) -> Path | None:
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or len(name) > 1000 or "\x00" in name:
        return None
    return into.joinpath(*(part[:200] for part in parts))


def _write(stream: IO[bytes], target: Path, budget: _Budget) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while piece := stream.read(_PIECE):
            budget.take(len(piece))
            file.write(piece)


class _Stream(io.RawIOBase):
    """Chunks as a file that can only be read on."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._kept = chunks, b""

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._kept) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._kept += chunk
        size = len(self._kept) if size < 0 else size
        found, self._kept = self._kept[:size], self._kept[size:]
        return found
