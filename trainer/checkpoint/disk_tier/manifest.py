"""The manifest of a checkpoint folder: names, sizes and BLAKE2b hashes of its files. It is written last.

    write_manifest(folder, {"step": 50, ...}, files={"__0_0.distcp": FileDigest(bytes=123, blake2b="...")})
    manifest = read_manifest(folder)            # raises CheckpointError unless it is intact
    verify_files(folder, manifest, names)       # raises CheckpointError if a file has changed

torch's format has no checksums, and its `.metadata` is a pickle, so torch opens nothing before the hashes match. Hashes
protect against damage, but not against an attacker who can write both the files and the manifest: load checkpoints only
from people whose code you would run.

A checkpoint counts as damaged only if two reads give the same result. If a file cannot be read now (EIO, ESTALE, too
many open files, no memory), StorageError is raised instead, because this proves nothing about the content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from probes.tape.files.safe_open import open_plain
from trainer.checkpoint import attempt_fence as fence
from trainer.fsync import fsync_path

__all__ = [
    "CONCLUSIVE_ERRORS",
    "MANIFEST_NAME",
    "CheckpointError",
    "FileDigest",
    "StorageError",
    "digest_file",
    "read_manifest",
    "verify_files",
    "write_json",
    "write_manifest",
]

_T = TypeVar("_T")
MANIFEST_NAME = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line with its name and the reason."""


class StorageError(Exception):
    """The storage of checkpoints cannot be read or written now. The message is one line. The files may be intact."""


CONCLUSIVE_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR})
"""Error numbers which prove that a file is missing, is a link or is not a regular file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and BLAKE2b-256 of one file."""

    bytes: int
    blake2b: str


def digest_file(path: Path, *, from_disk: bool = False) -> FileDigest:
    """Read and hash a file. Refuses links and anything that is not a regular file.

    `from_disk`: drop the file's clean pages from the page cache first, so that it is read from the disk.
    """
    with open(open_plain(path), "rb", buffering=0) as file:
        if from_disk:
            _drop_cached(file.fileno())
        digest, size = hashlib.blake2b(digest_size=32), 0
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(bytes=size, blake2b=digest.hexdigest())


def _drop_cached(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def write_manifest(folder: Path, content: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """Write and sync the manifest, which makes the folder complete."""
    manifest = {"format": FORMAT, **content, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_json(folder / MANIFEST_NAME, manifest | {"digest": _digest(manifest)})
    fsync_path(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest and verify its own hash. Raises CheckpointError if it is damaged, StorageError if it cannot be
    read now."""
    return _confirmed(folder, MANIFEST_NAME, lambda again: _read_manifest(folder, from_disk=again))


def verify_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str], *, from_disk: bool = False) -> None:
    """Compare files with the manifest. Raises CheckpointError for the first file that differs, StorageError if a file
    cannot be read now."""
    for name in names:
        _confirmed(folder, name, partial(_verify_file, folder, manifest, name, from_disk))


def _confirmed(folder: Path, name: str, read: Callable[[bool], _T]) -> _T:
    """Return `read(False)`. If it finds damage, return `read(True)`, which bypasses the page cache.

    Raises CheckpointError only if both calls find the same damage.
    """
    try:
        return _read_or_explain(folder, name, lambda: read(False))
    except CheckpointError as first:
        try:
            result = _read_or_explain(folder, name, lambda: read(True))
        except CheckpointError as second:
            if str(second) == str(first):
                raise
        else:
            return result
        raise StorageError(f"{folder.name}: {name} reads differently each time; check the disk") from None


def _read_or_explain(folder: Path, name: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except MemoryError:
        raise StorageError(f"{folder.name}: no memory is left to read {name}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in CONCLUSIVE_ERRORS:
            raise CheckpointError(f"{folder.name}: {name} cannot be read ({reason})") from None
        raise StorageError(f"{folder.name}: {name} cannot be read now ({reason})") from None


def _read_manifest(folder: Path, *, from_disk: bool) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    try:
        with open(open_plain(path), "rb") as file:
            if from_disk:
                _drop_cached(file.fileno())
            blob = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{folder.name}: has no {MANIFEST_NAME}, so it was never finished") from None
    try:
        manifest = json.loads(blob)
        claimed = manifest.pop("digest")
        if len(blob) > MAX_MANIFEST_BYTES or manifest["format"] != FORMAT:
            raise ValueError
        files = {str(name): FileDigest(**digest) for name, digest in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder.name}: {MANIFEST_NAME} is damaged or of another version") from None
    if claimed != _digest(manifest):
        read = hashlib.blake2b(blob, digest_size=6).hexdigest()
        raise CheckpointError(
            f"{folder.name}: {MANIFEST_NAME} does not have the hash that it was written with ({read})"
        )
    if any(Path(name).name != name or name == ".." or "\0" in name for name in files):
        raise CheckpointError(f"{folder.name}: {MANIFEST_NAME} names files outside the folder")
    loaded: dict[str, Any] = manifest | {"files": files}
    return loaded


def _verify_file(folder: Path, manifest: Mapping[str, Any], name: str, from_disk: bool, again: bool) -> None:
    expected: FileDigest = manifest["files"][name]
    found = digest_file(folder / name, from_disk=from_disk or again)
    if found.bytes != expected.bytes:
        raise CheckpointError(f"{folder.name}: {name} has {found.bytes} bytes, not {expected.bytes}")
    if found != expected:
        raise CheckpointError(
            f"{folder.name}: {name} does not have the hash that it was written with ({found.blake2b[:12]})"
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically, even across a power cut. Raises Fenced in a process of an older attempt."""
    fresh = fence.scratch(path)
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    fence.check()
    fresh.replace(path)
    fsync_path(path.parent)


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
