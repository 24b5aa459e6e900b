"""Unpack archives (.tar, also .tar.gz and the like, .zip) into a folder, within limits.

    problems = expand(Path("evidence.tar.gz"), into)

Only regular files are written, and no member can escape the folder. Links and devices are skipped and reported. If a
limit is exceeded, the rest is not read and SourceError is raised.
"""

from __future__ import annotations

import io
import lzma
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from probes.tape.redaction.printable import visible
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import SourceError, head, unpacked

__all__ = ["PlainMember", "expand", "is_archive"]

MAX_BYTES = 32 << 30
"""Maximum total size of all members, in bytes."""
ALWAYS_BYTES = 1 << 30
MAX_RATIO = 64
"""Maximum unpacked bytes per packed byte beyond ALWAYS_BYTES: logs and traces reach 10 to 40, a bomb 1,000."""
FREE_SHARE = 0.8
"""Share of the target disk's free space that may be used."""
MAX_MEMBERS = 20_000
ENTRY_BYTES = 512
"""Average size of a zip directory entry, in bytes."""
LOCAL_HEADER_BYTES = 30
"""Size of the header before each member of a zip, without its name."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of a member's extended headers (such as long names), which the library reads as a whole."""
MAX_NAME_BYTES = 200
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError,
    ValueError,
)  # fmt: skip
"""Errors that the libraries raise for damaged archives. SourceError, a ValueError, is passed on."""
_HOLES = "holds a file with holes (tar --sparse): the rest was not read"
_PIECE = 1 << 20
_TAR_MARK = slice(257, 262)


def is_archive(first: bytes) -> str:
    """Return `tar` or `zip` by the first bytes of the (gunzipped) content; empty for anything else."""
    if first[_TAR_MARK] == b"ustar":
        return "tar"
    return "zip" if first.startswith(b"PK\x03\x04") else ""


class PlainMember(tarfile.TarInfo):
    """A tar member with bounded headers, since the library would read extended headers and sparse maps of any
    length.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:  # the library's hook for special members
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*extended, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if not 0 <= self.size <= MAX_HEADER_BYTES:
                raise SourceError(f"holds a header of {self.size:,} bytes: the rest was not read")
        elif self.type == tarfile.GNUTYPE_SPARSE:
            raise SourceError(_HOLES)
        elif self.size > MAX_BYTES:  # the library would skip it block by block, even beyond the end of the archive
            raise SourceError(f"holds a file of {self.size:,} bytes: the rest was not read")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found

    def _proc_gnusparse_00(self, *_: object) -> None:
        raise SourceError(_HOLES)

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00


def expand(path: Path, into: Path) -> list[tuple[str, str]]:
    """Write the regular files below `into`. Returns (member, why it was skipped). Raises SourceError."""
    return confined(_expand, path, into)


def _expand(path: Path, into: Path) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    most = min(MAX_BYTES, ALWAYS_BYTES + path.stat().st_size * MAX_RATIO)
    budget = _Budget(min(most, int(shutil.disk_usage(into).free * FREE_SHARE)))
    try:
        members = _zip(path, problems) if is_archive(head(path, 512)) == "zip" else _tar(path, problems)
        for number, (name, stream, modified_s) in enumerate(members):
            if number >= MAX_MEMBERS:
                raise SourceError(f"holds more than {MAX_MEMBERS:,} files: the rest was not read")
            target = _target(into, name)
            if target is None:
                problems.append((name, "has a name that leads out of the archive: left out"))
                continue
            try:
                _write(stream, target, budget)
                os.utime(target, (modified_s, modified_s))
            except SourceError:
                raise
            except _DAMAGE as error:  # in a tar the rest is unreadable, too: the next member raises
                problems.append((name, _damage(error)))
    except SourceError:
        raise
    except _DAMAGE as error:
        raise SourceError(_damage(error)) from None
    return problems


def _damage(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"is damaged or cut off: {visible(text)[:100]}" if text else "is damaged or cut off"


class _Budget:
    def __init__(self, left_bytes: int) -> None:
        self._left = left_bytes

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise SourceError("unpacks to more than the limit: the rest was not read")


def _tar(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[str, IO[bytes], float]]:
    with tarfile.open(fileobj=_Stream(unpacked(path, MAX_BYTES)), mode="r|", tarinfo=PlainMember) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # otherwise every member is kept, with its headers
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is not None:
                yield member.name, stream, max(0.0, float(member.mtime))
            elif not member.isdir():
                problems.append((member.name, "is a link or a device: left out"))


def _zip(path: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[str, IO[bytes], float]]:
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        _check_members(archive.infolist())
        names = archive.namelist()
        if all(any(name.endswith(end) for name in names) for end in ("/data.pkl", "/version")):
            raise SourceError("is a file of torch.save, which is not read")
        for member in archive.infolist():
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                problems.append((member.filename, "is encrypted: left out"))
                continue
            try:
                stream = archive.open(member)
            except _DAMAGE as error:
                problems.append((member.filename, _damage(error)))
                continue
            with stream:
                yield member.filename, stream, path.stat().st_mtime


def _check_directory(path: Path) -> None:
    """Raise SourceError for a zip with too many entries, before the library creates an object for each."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 17)))
        tail = file.read()
    num_members = num_bytes = 0
    if (at := tail.rfind(b"PK\x05\x06")) >= 0 and len(tail) >= at + 16:
        num_members, num_bytes = struct.unpack_from("<HL", tail, at + 10)
    if (at := tail.rfind(b"PK\x06\x06")) >= 0 and len(tail) >= at + 48:
        num_members, num_bytes = struct.unpack_from("<QQ", tail, at + 32)
    if num_members > MAX_MEMBERS or num_bytes > MAX_MEMBERS * ENTRY_BYTES:
        raise SourceError(f"holds {num_members:,} files: at most {MAX_MEMBERS:,} are read")


def _check_members(members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise SourceError if members overlap in the file: with such members a small archive can unpack to any size, and
    no program writes them.
    """
    end = 0
    for member in sorted(members, key=lambda one: one.header_offset):
        if member.header_offset < end:
            raise SourceError("holds members that share bytes: it was not read")
        end = member.header_offset + LOCAL_HEADER_BYTES + member.compress_size


def _target(into: Path, name: str) -> Path | None:
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or len(name) > 1000 or "\x00" in name:
        return None
    return into.joinpath(*(os.fsencode(part)[:MAX_NAME_BYTES].decode(errors="ignore") for part in parts))


def _write(stream: IO[bytes], target: Path, budget: _Budget) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while piece := stream.read(_PIECE):
            budget.take(len(piece))
            file.write(piece)


class _Stream(io.RawIOBase):
    """Forward-only file object over chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._buffer = chunks, b""

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._buffer) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._buffer += chunk
        size = len(self._buffer) if size < 0 else size
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found
