"""Open untrusted files: regular files only, no symlinks, bounded reads.

    for path in survey(folder).paths: ...
    for chunk in unpacked(path): ...        # bytes, unpacked if compressed; raises SourceError

Links, FIFOs and devices are listed as problems and not opened, since that could read another file or block forever.
"""

from __future__ import annotations

import bz2
import importlib
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from probes.tape.files.safe_open import LINK, NOT_PLAIN, open_plain

__all__ = [
    "DOCUMENT_BYTES",
    "MAX_RANK",
    "MAX_ROWS",
    "NO_RANK",
    "REPORT_BYTES",
    "SERIES_BYTES",
    "SourceError",
    "Survey",
    "first_bytes",
    "head",
    "rank_of_name",
    "read_whole",
    "survey",
    "unpacked",
]

CHUNK_BYTES = 1 << 20
MAX_ZEROS_BYTES = 1 << 30
"""Maximum number of zero bytes that may precede a text."""
REPORT_BYTES = 16 << 20
"""Maximum bytes of a command's output."""
DOCUMENT_BYTES = 64 << 20
"""Maximum bytes of a file that is read as a whole."""
SERIES_BYTES = 512 << 20
"""Maximum bytes of a file that is read row by row."""
MAX_ROWS = 1_000_000
"""Maximum rows per file and table."""
MAX_FILES = 20_000
MAX_DEPTH = 6
"""Maximum depth of folders, enough for torchrun's `--log-dir`: host/job/logs/none_x1/attempt_0/3."""
MAX_PROBLEMS = 50
MAX_UNPACKED_BYTES = 4 << 30
"""Maximum unpacked bytes of one file, against compression bombs. A trace of 8 million events has about 2 GiB."""
MAX_MEMBERS = 100_000
"""Maximum gzip members of one file, each of which costs microseconds. With bgzip's members of 64 KiB that allows 6 GB.
"""
MAX_EMPTY_MEMBERS = 1000
"""Maximum consecutive empty gzip members."""
MEMBER_BYTES = 1 << 10
"""Size of the first piece passed to zlib, which copies the bytes after a member's end; later pieces grow 8-fold."""
PIECE_BYTES = 64 << 10
"""Size of the pieces passed to bz2 and lzma, which copy the bytes after a stream's end."""
XZ_MEMORY_BYTES = 256 << 20
"""Maximum memory to unpack xz; `xz -9` needs 65 MiB."""
_GZIP = b"\x1f\x8b"
_STREAMS: dict[bytes, Callable[[], Any]] = {
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES),
}
"""Decompressor by the first bytes of a file."""
_RANK = re.compile(r"(?<!local_)(?<!local-)(?<!node_)(?<!group_)rank[_\-.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)(\d{1,7})(?!\d)")
MAX_RANK = 1_000_000
NO_RANK = "states no rank"
"""Start of the problem text for a file that cannot be combined with others."""


ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a zstd file."""


class ZstdError(ValueError):
    """A zstd file cannot be read; the message says why."""


def zstd_chunks(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    """The file's content in pieces. Raises ZstdError."""
    with open(path, "rb") as file, _decompressor(file) as stream:
        while True:
            try:
                chunk = stream.read(chunk_bytes)
            except Exception as error:  # each library raises different types
                raise ZstdError(f"is damaged or cut off: {str(error)[:100]}") from None
            if not chunk:
                return
            yield bytes(chunk)


def _decompressor(file: Any) -> Any:
    try:
        return importlib.import_module("compression.zstd").ZstdFile(file)
    except ModuleNotFoundError:
        pass
    try:
        return importlib.import_module("pyarrow").CompressedInputStream(file, "zstd")
    except ModuleNotFoundError:
        raise ZstdError("is compressed by zstd: unpack it, or pip install pyarrow") from None


class SourceError(ValueError):
    """A file or folder cannot be read; the message is one line. A reader's message continues the file's name ("is cut
    off").
    """


@dataclass(slots=True)
class Survey:
    """Regular files below a folder in order of their names, and the problems of skipped ones."""

    paths: list[Path] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)

    def add_problem(self, path: Path, problem: str) -> None:
        """Add a problem under the file's relative path, as in the report. If the path is absolute, the file's name is
        used. The number of problems is bounded, so that a folder of unrelated files does not fill the report.
        """
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append({"path": path.name if path.is_absolute() else str(path), "problem": problem})


def survey(folder: Path) -> Survey:
    """List the files of a folder (or the one given file). Raises SourceError if it cannot be listed."""
    found = Survey()
    if not folder.is_dir():
        found.paths.append(folder)
        return found
    try:
        _walk(folder, MAX_DEPTH, found)
    except OSError as error:
        raise SourceError(f"{folder}: {error.strerror}") from None
    found.paths.sort()
    return found


def _walk(folder: Path, depth: int, found: Survey) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if len(found.paths) >= MAX_FILES:
                found.add_problem(folder, f"holds more than {MAX_FILES} files: the rest was not read")
                return
            if entry.is_symlink():
                found.add_problem(path, LINK)
            elif entry.is_dir(follow_symlinks=False):
                try:
                    if depth:
                        _walk(path, depth - 1, found)
                    else:
                        found.add_problem(path, f"is more than {MAX_DEPTH} folders deep and was not read")
                except OSError as error:
                    found.add_problem(path, f"cannot be listed: {error.strerror}")
            elif entry.is_file(follow_symlinks=False):
                found.paths.append(path)
            else:
                found.add_problem(path, NOT_PLAIN)


def _opened(path: Path) -> int:
    """Open a regular file and return the descriptor. Raises SourceError."""
    try:
        return open_plain(path)
    except OSError as error:
        is_clear = error.strerror in (LINK, NOT_PLAIN)
        raise SourceError(str(error.strerror) if is_clear else f"cannot be opened: {error.strerror}") from None


def read_whole(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Read a file's unpacked content and its modification time (epoch nanoseconds). Raises SourceError."""
    fd = _opened(path)
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise SourceError(f"has {size:,} bytes: more than the {max_bytes:,} that are read")
        data = file.read(size)  # read(n) allocates n bytes in advance
        modified = os.fstat(fd).st_mtime_ns
    return b"".join(unpacked(path, max_bytes)) if data.startswith((_GZIP, ZSTD, *_STREAMS)) else data, modified


def first_bytes(path: Path, num_bytes: int) -> tuple[bytes, int]:
    """First bytes as stored (not unpacked), and the size of the file."""
    with open(_opened(path), "rb") as file:
        return file.read(num_bytes), os.fstat(file.fileno()).st_size


def modified_ns(path: Path) -> int:
    """Modification time of a file (epoch nanoseconds); 0 if unknown."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def unpacked(path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> Iterator[bytes]:
    """Yield a file in chunks of at most 1 MiB, unpacked if compressed (gzip, zstd, xz, bzip2). Raises SourceError if
    it is truncated or too large.
    """
    total = 0
    with open(_opened(path), "rb") as file:
        first = file.read(CHUNK_BYTES)
        chunks = _chunks(path, file, first)
        try:
            for chunk in chunks:
                total += len(chunk)
                if total > max_bytes:
                    raise SourceError(f"holds more than {max_bytes:,} bytes: the rest was not read")
                yield chunk
        except ZstdError as error:
            raise SourceError(str(error)) from None


def _chunks(path: Path, file: IO[bytes], first: bytes) -> Iterator[bytes]:
    if first.startswith(_GZIP):
        return _gunzipped(file, first)
    for mark, decompressor in _STREAMS.items():
        if first.startswith(mark):
            return _streams(file, mark, decompressor)
    return zstd_chunks(path, CHUNK_BYTES) if first.startswith(ZSTD) else _plain(file, first)


def _plain(file: IO[bytes], first: bytes) -> Iterator[bytes]:
    chunk = first
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def _gunzipped(file: IO[bytes], first: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    num_bytes, problem = 0, ""
    members = _members(file, first)
    while True:
        try:
            part = next(members, None)
        except (SourceError, zlib.error) as error:
            problem, part = str(error) if isinstance(error, SourceError) else f"is damaged: {error}", None
        if part is not None and num_bytes + len(part) <= CHUNK_BYTES:
            parts.append(part)
            num_bytes += len(part)
            continue
        if parts:
            yield b"".join(parts)
        if part is None:
            break
        parts, num_bytes = [part], len(part)
    if problem:
        raise SourceError(problem)


def _members(file: IO[bytes], chunk: bytes) -> Iterator[bytes]:
    """Yield the content of all members of a gzip file, in pieces of any size. Raises SourceError and zlib.error."""
    inflate = zlib.decompressobj(31)
    num_members, num_empty, size = 1, 0, MEMBER_BYTES
    while chunk:
        view, at = memoryview(chunk), 0
        while at < len(view):
            piece = view[at : at + size]
            at += len(piece)
            size = min(8 * size, CHUNK_BYTES)
            rest: bytes | memoryview = piece
            while rest:
                if part := inflate.decompress(rest, CHUNK_BYTES):
                    num_empty = 0
                    yield part
                rest = inflate.unconsumed_tail
            if not inflate.eof:
                continue
            at -= len(inflate.unused_data)
            if at == len(view):
                view, at = memoryview(file.read(CHUNK_BYTES)), 0
            if view[at : at + 1] != _GZIP[:1]:
                return  # not a further member
            num_members += 1
            num_empty += 1
            if num_empty > MAX_EMPTY_MEMBERS:
                raise SourceError("holds thousands of empty parts: no file does")
            if num_members > MAX_MEMBERS:
                raise SourceError(f"holds more than {MAX_MEMBERS:,} compressed parts: the rest was not read")
            inflate, size = zlib.decompressobj(31), MEMBER_BYTES
        chunk = file.read(CHUNK_BYTES)
    raise SourceError("is cut off: the end of the compressed data is missing")


def _streams(file: IO[bytes], mark: bytes, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of all streams of an xz or bzip2 file. Raises SourceError."""
    num_streams = num_empty = 0
    file.seek(0)
    rest = file.read(PIECE_BYTES)
    while rest.startswith(mark):
        num_streams, num_empty = num_streams + 1, num_empty + 1
        if num_empty > MAX_EMPTY_MEMBERS or num_streams > MAX_MEMBERS:
            raise SourceError("holds thousands of compressed parts: the rest was not read")
        inflate = decompressor()
        while not inflate.eof:
            if inflate.needs_input and not rest:
                raise SourceError("is cut off: the end of the compressed data is missing")
            try:
                part = inflate.decompress(rest, CHUNK_BYTES)
            except (lzma.LZMAError, OSError) as error:
                raise SourceError(f"is damaged: {error}") from None
            if part:
                num_empty = 0
                yield part
            rest = file.read(PIECE_BYTES) if inflate.needs_input else b""
        rest = inflate.unused_data or file.read(PIECE_BYTES)
        rest += file.read(PIECE_BYTES) if len(rest) < len(mark) else b""


def head(path: Path, num_bytes: int = 4096, *, is_after_zeros: bool = False) -> bytes:
    """First bytes of a file, unpacked; fewer if it is damaged. `is_after_zeros`: skip leading zero bytes."""
    found = b""
    max_bytes = MAX_ZEROS_BYTES if is_after_zeros else num_bytes + CHUNK_BYTES
    try:
        for chunk in unpacked(path, max_bytes=max_bytes):
            if is_after_zeros and not found and not (chunk := chunk.lstrip(b"\0")):
                continue
            found += chunk[:num_bytes]
            if len(found) >= num_bytes:
                break
    except SourceError:
        if not found:
            raise
    return found[:num_bytes]


def rank_of_name(path: Path) -> int | None:
    """Rank in a path. It is the number after `rank` in the name of the file or its folder. Without this, it is the last
    number before the suffixes.
    """
    if marked := _RANK.findall(path.name) or _RANK.findall(path.parent.name):
        return _rank(marked[-1])
    numbers = _NUMBER.findall(path.name.split(".")[0]) or _NUMBER.findall(path.name)
    return _rank(numbers[-1]) if numbers else None


def _rank(digits: str) -> int | None:
    return int(digits) if int(digits) < MAX_RANK else None
